"""Page-locked host memory for copies from a GPU, which is kept for the next copies."""

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
    """Copies of tensors in host memory that is reused for the next copies.

    New memory costs more than the copy, because the kernel maps it page by page and locks it for
    the GPU. So each key has one copy at a time, and `reserve` allocates the memory in advance.
    """

    def __init__(self) -> None:
        self._memory: dict[Hashable, Tensor] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, tensors: Mapping[Hashable, Tensor]) -> None:
        """Begin to allocate the memory of copies in a thread; only sizes of the tensors matter."""
        sizes = {key: _size(tensor) for key, tensor in tensors.items()}
        device = torch.cuda.current_device() if DEVICE.type == "cuda" else None
        self._reserving = threading.Thread(
            target=self._reserve, args=(sizes, device), name=_THREAD, daemon=True
        )
        self._reserving.start()

    def _reserve(self, sizes: Mapping[Hashable, int], device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread starts on the first GPU
        for key, size in sizes.items():
            try:
                self._memory[key] = host_memory(size)
            except MemoryError:  # the copy that needs the memory tries again, and raises
                return

    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Copy a tensor to memory of its key; the copy is complete after `finish_copies`.

        Raises
        ------
        MemoryError
            The host memory is exhausted.

        """
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
    """Allocate page-locked memory, [size] uint8, which copies quickly to and from a GPU.

    torch's pinned memory would be rounded up to a power of two.

    Raises
    ------
    MemoryError
        The host memory is exhausted.

    """
    memory = np.empty(size, np.uint8)
    if DEVICE.type == "cuda" and size:
        runtime, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(address, size, 0))
        if error != 0:
            raise MemoryError(
                f"{size >> 20} MiB of host memory cannot be locked: CUDA error {error}"
            )
        # CUDA refuses copies from new memory that it considers partly locked. So unlock it before
        # numpy frees it, which is after the last tensor that uses it.
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory)


def finish_copies() -> None:
    """Wait until all copies are complete."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def finish_reservations() -> None:
    """Wait until all reserved memory is allocated, for measurements."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()
