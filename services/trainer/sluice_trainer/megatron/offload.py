"""A trainer that shares its GPUs: what the engines need the room of lies in host memory while they
generate.

Tensors stay the same objects, with the same views of each other: only the memory behind them goes
and comes back, with the same bytes in it. So nothing of Megatron or of an optimizer has to know,
and training goes on to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from sluice_trainer.megatron.adaptations import DEVICE
from sluice_trainer.megatron.step.learner import Learner


class Storages:
    """The memory behind some tensors, which leaves the device and comes back.

    tensors: asked at each leave, since optimizers make theirs late. of_use: whether the contents
    matter; where not, what comes back is anything. constant: they never change, so that one copy is
    enough.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        *,
        of_use: bool = True,
        constant: bool = False,
    ) -> None:
        self._tensors, self._of_use, self._constant = tensors, of_use, constant
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._host: dict[int, Tensor] = {}

    def leave(self) -> None:
        if self._away:
            return
        found = {s._cdata: s for s in (t.untyped_storage() for t in self._tensors()) if _is_here(s)}
        if self._of_use:
            for key, storage in found.items():
                known = key in self._host
                if not known:
                    self._host[key] = _host_memory(storage.nbytes())
                if not (known and self._constant):
                    self._host[key].copy_(_bytes(storage), non_blocking=True)
            _finish_copies()
        self._away = [(storage, storage.nbytes()) for storage in found.values()]
        for storage in found.values():
            storage.resize_(0)

    def come_back(self) -> None:
        for storage, size in self._away:
            storage.resize_(size)
            if self._of_use:
                _bytes(storage).copy_(self._host[storage._cdata], non_blocking=True)
        _finish_copies()
        self._away = []


class Offload:
    """Memory that a policy's parts leave, as `trainer.offload` says."""

    def __init__(
        self,
        what: Literal["none", "optimizer", "all"],
        learners: Iterable[Learner],
        frozen: list[Any],
    ) -> None:
        """frozen: models that are only asked (reference, teacher), as their chunks."""
        learners = list(learners)
        self._weights, self._rest = list[Storages](), list[Storages]()
        if what == "all":
            self._weights = [Storages(lambda: _weights(learners))]
            self._rest += [Storages(lambda: _tensors_of(frozen), constant=True)]
        if what != "none":
            # Every step begins with zeroed gradients.
            self._rest += [Storages(lambda: _gradients(learners), of_use=False)]
            self._rest += [Storages(lambda: _optimizer_state(learners))]
        self._learners = learners

    def leave(self, *, weights: bool) -> None:
        """Make room: all but the weights of what learns, or, with `weights`, those as well."""
        for learner in self._learners if self._rest else ():
            # Lets go of the gradients' copies that the optimizer has made.
            learner.optimizer.zero_grad()
        for each in [*self._rest, *(self._weights if weights else [])]:
            each.leave()
        if DEVICE.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call] # buckets that an engine has closed a moment ago
            torch.cuda.empty_cache()

    def come_back(self, *, weights_only: bool = False) -> None:
        """Weights of what learns, or everything."""
        for each in [*self._weights, *([] if weights_only else self._rest)]:
            each.come_back()


def memory_used() -> int:
    """Bytes of this process's GPU that are taken, by whomever. 0 on the CPU."""
    if DEVICE.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _weights(learners: Iterable[Learner]) -> Iterator[Tensor]:
    for learner in learners:
        yield from _tensors_of([chunk.module for chunk in learner.chunks])


def _tensors_of(models: Iterable[Any]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


def _gradients(learners: Iterable[Learner]) -> Iterator[Tensor]:
    for learner in learners:
        for chunk in learner.chunks:
            yield from (
                buffer.grad_data for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
            )


def _optimizer_state(learners: Iterable[Learner]) -> Iterator[Tensor]:
    """Moments and, in bf16, the weights in fp32. In fp32 the optimizer's weights are views of the
    model's own.
    """
    learners = list(learners)
    own = {tensor.untyped_storage()._cdata for tensor in _weights(learners)}
    for learner in learners:
        for part in getattr(learner.optimizer, "chained_optimizers", [learner.optimizer]):
            if part.is_stub_optimizer:
                continue
            state = [value for values in part.optimizer.state.values() for value in values.values()]
            masters = [
                parameter for group in part.optimizer.param_groups for parameter in group["params"]
            ]
            held = [tensor for tensor in (*state, *masters) if isinstance(tensor, Tensor)]
            yield from (tensor for tensor in held if tensor.untyped_storage()._cdata not in own)


def _is_here(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == DEVICE.type and storage.nbytes() > 0


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(size: int) -> Tensor:
    """Page-locked, for the speed of copies. torch's own would be rounded up to a power of two."""
    memory = torch.empty(size, dtype=torch.uint8)
    if DEVICE.type == "cuda":
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            raise MemoryError(
                f"{size >> 20} MiB of host memory for trainer.offload cannot be locked: CUDA error "
                f"{error}"
            )
    return memory


def _finish_copies() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
