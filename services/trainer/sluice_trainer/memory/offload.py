"""Offloading: the trainer's GPU memory moves to the host while colocated engines generate.

Tensors stay the same objects with the same views of each other: only the memory behind them is
freed and allocated again with the same bytes. So the backend's library and the optimizers need not
know, and training continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.memory.staging import finish_copies, host_memory

Tensors = Callable[[], Iterable[Tensor]]


class OffloadableMemory:
    """The device memory behind some tensors, which can move to the host and back.

    Parameters
    ----------
    tensors
        Returns the tensors. Called at each offload, since optimizers create theirs late.
    preserve
        Keep the contents; otherwise the restored contents are undefined.
    constant
        The contents never change, so one copy is enough.

    """

    def __init__(self, tensors: Tensors, *, preserve: bool = True, constant: bool = False) -> None:
        self._tensors, self._preserve, self._constant = tensors, preserve, constant
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []
        self._host: dict[int, Tensor] = {}

    def offload(self) -> None:
        """Copy the memory to the host and free it; no-op if it is offloaded."""
        if self._offloaded:
            return
        # Several tensors may be views of the same storage, which is moved once.
        storages = (tensor.untyped_storage() for tensor in self._tensors())
        on_device = {storage._cdata: storage for storage in storages if _is_on_device(storage)}
        if self._preserve:
            for key, storage in on_device.items():
                copied = key in self._host
                if not copied:
                    self._host[key] = host_memory(storage.nbytes())
                if not (copied and self._constant):
                    self._host[key].copy_(_bytes(storage), non_blocking=True)
            finish_copies()
        self._offloaded = [(storage, storage.nbytes()) for storage in on_device.values()]
        for storage in on_device.values():
            # Frees the memory, while all views of the storage stay valid objects.
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again and copy the contents back; no-op if it is on the device."""
        for storage, size in self._offloaded:
            storage.resize_(size)
            if self._preserve:
                _bytes(storage).copy_(self._host[storage._cdata], non_blocking=True)
        finish_copies()
        self._offloaded = []


class Offload:
    """The memory of a policy that `trainer.offload` moves to the host.

    Parameters
    ----------
    what
        Value of `trainer.offload`.
    weights
        Weights of the models that learn.
    frozen
        Weights of the models that only score (reference, teacher).
    gradients
        Gradients of the models that learn.
    optimizer
        Moments, and the fp32 weights if they are not the model's.
    before
        Called before an offload; frees what none of the tensors above names.

    """

    def __init__(
        self,
        what: Literal["none", "optimizer", "all"],
        *,
        weights: Tensors,
        frozen: Tensors,
        gradients: Tensors,
        optimizer: Tensors,
        before: Callable[[], None],
    ) -> None:
        self._weights, self._rest = list[OffloadableMemory](), list[OffloadableMemory]()
        if what == "all":
            self._weights = [OffloadableMemory(weights)]
            self._rest += [OffloadableMemory(frozen, constant=True)]
        if what != "none":
            # Every step begins with zeroed gradients, so their contents need no copy.
            self._rest += [
                OffloadableMemory(gradients, preserve=False),
                OffloadableMemory(optimizer),
            ]
        self._before = before

    def offload(self, *, weights: bool) -> None:
        """Move everything to the host, except the weights that learn unless `weights` is set."""
        if self._rest:
            self._before()
        for memory in [*self._rest, *(self._weights if weights else [])]:
            memory.offload()
        if DEVICE.type == "cuda":
            # Frees buckets that an engine has just closed.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def restore(self, *, weights_only: bool = False) -> None:
        """Move everything back to the device, or only the weights that learn."""
        for memory in [*self._weights, *([] if weights_only else self._rest)]:
            memory.restore()


def memory_used() -> int:
    """Return the used bytes of this process's GPU, by all processes; 0 on a CPU."""
    if DEVICE.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _is_on_device(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == DEVICE.type and storage.nbytes() > 0


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
