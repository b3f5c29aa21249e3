"""A trainer that shares its GPUs: its memory goes to the host while the engines generate.

Tensors stay the same objects, with the same views of each other: only the memory behind them goes
and comes back, with the same bytes in it. So neither the backend's library nor an optimizer has to
know, and training goes on to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.memory.staging import finish_copies, host_memory

Tensors = Callable[[], Iterable[Tensor]]


class Storages:
    """The memory behind some tensors, which leaves the device and comes back.

    tensors: asked at each leave, since optimizers make theirs late. of_use: whether the contents
    matter; where not, what comes back is anything. constant: they never change, so that one copy
    is enough.
    """

    def __init__(self, tensors: Tensors, *, of_use: bool = True, constant: bool = False) -> None:
        self._tensors, self._of_use, self._constant = tensors, of_use, constant
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._host: dict[int, Tensor] = {}

    def leave(self) -> None:
        if self._away:
            return
        storages = (tensor.untyped_storage() for tensor in self._tensors())
        here = {storage._cdata: storage for storage in storages if _is_here(storage)}
        if self._of_use:
            for key, storage in here.items():
                known = key in self._host
                if not known:
                    self._host[key] = host_memory(storage.nbytes())
                if not (known and self._constant):
                    self._host[key].copy_(_bytes(storage), non_blocking=True)
            finish_copies()
        self._away = [(storage, storage.nbytes()) for storage in here.values()]
        for storage in here.values():
            storage.resize_(0)

    def come_back(self) -> None:
        for storage, size in self._away:
            storage.resize_(size)
            if self._of_use:
                _bytes(storage).copy_(self._host[storage._cdata], non_blocking=True)
        finish_copies()
        self._away = []


class Offload:
    """Memory that a policy's parts leave, as `trainer.offload` says."""

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
        """weights: of what learns. frozen: of models that are only asked (reference, teacher).

        optimizer: moments, and the weights in fp32 where they are not the model's own. before:
        called first, lets go of whatever the tensors above do not name.
        """
        self._weights, self._rest = list[Storages](), list[Storages]()
        if what == "all":
            self._weights = [Storages(weights)]
            self._rest += [Storages(frozen, constant=True)]
        if what != "none":
            # Every step begins with zeroed gradients.
            self._rest += [Storages(gradients, of_use=False), Storages(optimizer)]
        self._before = before

    def leave(self, *, weights: bool) -> None:
        """Make room: all but the weights of what learns, or, with `weights`, those as well."""
        if self._rest:
            self._before()
        for each in [*self._rest, *(self._weights if weights else [])]:
            each.leave()
        if DEVICE.type == "cuda":
            # Buckets that an engine has closed a moment ago.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
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


def _is_here(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == DEVICE.type and storage.nbytes() > 0


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
