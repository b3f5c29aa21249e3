"""Where a trainer's model lives, and what a step takes of its memory."""

from __future__ import annotations

from typing import Protocol

import torch

from sluice_trainer.memory.headroom import Memory

DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
"""The current GPU, or the CPU where there is none."""


class MemoryProbe(Protocol):
    """Measures a step."""

    def begin(self) -> None:
        """The step begins."""

    def end(self) -> Memory:
        """The memory of the step, which is done."""

    def release(self) -> None:
        """Give back what is held without being in use."""


class GpuMemory:
    """Measures steps of this process on its GPU.

    What others hold of it (engines, libraries beside torch) is neither free nor usable: to be asked
    where theirs is as it will be in the next step.
    """

    def __init__(self) -> None:
        self._before = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def end(self) -> Memory:
        free, _ = torch.cuda.mem_get_info()
        return Memory(
            static=min(self._before, torch.cuda.memory_allocated()),
            peak=torch.cuda.max_memory_allocated(),
            usable=torch.cuda.memory_reserved() + free,
        )

    def release(self) -> None:
        torch.cuda.empty_cache()


MEMORY: MemoryProbe | None = GpuMemory() if DEVICE.type == "cuda" else None
"""None on a CPU, whose memory is everybody's."""
