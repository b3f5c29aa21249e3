"""Host memory that a GPU copies to quickly, and that is kept."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from sluice_trainer.device import DEVICE


class Staging:
    """Copies of tensors in host memory, whose memory serves again for the next ones.

    New memory costs more than the copy: the kernel hands it out page by page, and locks it for the
    GPU. So there is one copy for a key at a time.
    """

    def __init__(self) -> None:
        self._memory: dict[Hashable, Tensor] = {}

    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """A copy with memory of its own, whole after `finish_copies`."""
        size = tensor.numel() * tensor.element_size()
        memory = self._memory.get(key)
        if memory is None or memory.numel() != size:
            memory = self._memory[key] = host_memory(size)
        copy = memory.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor.detach(), non_blocking=True)
        return copy


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
