"""Host memory that a GPU copies to quickly, and that is kept."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Mapping

import numpy as np
import torch
from torch import Tensor

from sluice_trainer.distributed.device import DEVICE

_THREAD = "host-memory"


class Staging:
    """Copies of tensors in host memory, whose memory serves again for the next ones.

    New memory costs more than the copy: the kernel hands it out page by page, and locks it for the
    GPU. So there is one copy for a key at a time, and `reserve` gets the memory beforehand.
    """

    def __init__(self) -> None:
        self._memory: dict[Hashable, Tensor] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, tensors: Mapping[Hashable, Tensor]) -> None:
        """Begin to get the memory of copies, in a thread. Only sizes are taken of the tensors."""
        sizes = {key: _size(tensor) for key, tensor in tensors.items()}
        device = torch.cuda.current_device() if DEVICE.type == "cuda" else None
        self._reserving = threading.Thread(
            target=self._reserve, args=(sizes, device), name=_THREAD, daemon=True
        )
        self._reserving.start()

    def _reserve(self, sizes: Mapping[Hashable, int], device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins on the first GPU
        for key, size in sizes.items():
            try:
                self._memory[key] = host_memory(size)
            except MemoryError:  # the copy that needs it says so, where it is still so
                return

    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """A copy with memory of its own, whole after `finish_copies`. Raises MemoryError."""
        if self._reserving:
            self._reserving.join()
            self._reserving = None
        memory = self._memory.get(key)
        if memory is None or memory.numel() != _size(tensor):
            memory = self._memory[key] = host_memory(_size(tensor))
        copy = memory.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor.detach(), non_blocking=True)
        return copy


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def host_memory(size: int) -> Tensor:
    """So many bytes, [size] uint8, page-locked for the speed of copies for as long as they live.

    torch's own would be rounded up to a power of two. Raises MemoryError.
    """
    memory = np.empty(size, np.uint8)
    if DEVICE.type == "cuda" and size:
        runtime, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(address, size, 0))
        if error != 0:
            raise MemoryError(
                f"{size >> 20} MiB of host memory cannot be locked: CUDA error {error}"
            )
        # CUDA refuses copies of memory of which it still takes a part for locked. numpy calls this
        # before it gives the memory back, however many tensors had looked at it.
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory)


def finish_copies() -> None:
    """Wait until all copies are whole."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def finish_reservations() -> None:
    """Wait until all memory that was asked for beforehand is there: for measurements."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()
