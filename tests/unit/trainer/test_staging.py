"""Host memory is locked for a GPU; here the calls of CUDA are recorded on a CPU."""

from __future__ import annotations

import pytest
import torch

from sluice_trainer.memory import staging


class Runtime:
    """Writes down what is locked and let go, as CUDA would."""

    def __init__(self, error: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self._error = error

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def locking(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    monkeypatch.setattr(staging, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)


def test_memory_is_locked_until_the_last_view_of_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locking(monkeypatch, runtime := Runtime())
    view = staging.host_memory(4096).view(torch.float32)[8:]
    assert [*runtime.locked.values()] == [4096]
    assert next(iter(runtime.locked)) == view.untyped_storage().data_ptr()
    del view
    assert not runtime.locked


def test_memory_that_cannot_be_locked_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    locking(monkeypatch, Runtime(error=2))
    with pytest.raises(MemoryError, match="1 MiB of host memory cannot be locked: CUDA error 2"):
        staging.host_memory(1 << 20)


def test_a_copy_of_another_size_frees_the_old_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = staging.Staging()
    locking(monkeypatch, runtime := Runtime())
    memory.copy("weights", torch.ones(1024))
    memory.copy("weights", torch.ones(2048))
    assert [*runtime.locked.values()] == [8192]


def test_a_copy_uses_the_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1024.0)
    memory = staging.Staging()
    memory.reserve({"weights": tensor})
    staging.finish_reservations()
    monkeypatch.setattr(staging, "host_memory", None)
    assert torch.equal(memory.copy("weights", tensor), tensor)


def test_a_failed_reservation_is_raised_by_the_copy_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(size: int) -> torch.Tensor:
        raise MemoryError(f"{size} bytes of host memory cannot be locked")

    monkeypatch.setattr(staging, "host_memory", none_left)
    memory = staging.Staging()
    memory.reserve({"weights": torch.ones(2)})
    with pytest.raises(MemoryError, match="8 bytes of host memory cannot be locked"):
        memory.copy("weights", torch.ones(2))
