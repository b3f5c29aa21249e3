"""The micro-batch size that fits, from the memory that a training step used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sluice_trainer.distributed.device import DEVICE

# Share of the usable memory that stays free: for steps with other sequence lengths, fragments that
# the allocator cannot use, and buffers that collectives allocate later.
MARGIN = 0.2
# Fewest micro-batches per pipeline stage: with fewer, stages idle for more than a fifth of a step.
STAGE_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of a GPU in a training step, as this process sees them.

    Attributes
    ----------
    static
        Allocated before and after the step: the smaller of the two.
    peak
        Largest allocation during the step.
    usable
        Memory that the process may allocate: what it holds and what is free.

    """

    static: int
    peak: int
    usable: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of the training step whose memory was measured.

    Attributes
    ----------
    tokens
        Tokens of the largest micro-batch, on this GPU.
    batches
        Micro-batches of an optimizer step.
    stages
        Stages of the pipeline.

    """

    tokens: int
    batches: int
    stages: int = 1


def next_size(work: StepWork, memory: StepMemory, size: int, most: int) -> int | None:
    """Decide how many tokens the micro-batches of the next step may have.

    All memory but the static part is assumed to grow in proportion to the tokens. Gradients and
    chunks of logits do not grow, so the estimate errs on the safe side. A step without a large
    micro-batch decides nothing, nor does a step with too few micro-batches to halve their number:
    in a pipeline such a step has not filled the stages, whose activations add up.

    Parameters
    ----------
    work
        Work of the measured step.
    memory
        Memory of the measured step.
    size
        Tokens that a micro-batch may have now.
    most
        Upper limit of the size.

    Returns
    -------
    Twice `size` if it fits, else `size`; None if the step is no evidence.

    """
    larger = min(2 * size, most)
    if larger <= size:
        return size
    fewest = 2 if work.stages == 1 else 2 * STAGE_MICRO_BATCHES * work.stages
    if 2 * work.tokens < size or work.batches < fewest:
        return None
    needed = memory.static + (memory.peak - memory.static) * larger / work.tokens
    return larger if needed <= (1 - MARGIN) * memory.usable else size


class MemoryProbe(Protocol):
    """A measurement of a training step's memory."""

    def begin(self) -> None:
        """Note the memory before a step."""

    def end(self) -> StepMemory:
        """Return the memory of the step that has ended."""

    def release(self) -> None:
        """Release cached memory that is not in use."""


class GpuMemory:
    """Measures the memory of steps of this process on its GPU.

    Memory that others hold (engines, libraries other than torch) is neither free nor usable.
    Measure when they hold as much as they will in the next step.
    """

    def __init__(self) -> None:
        self._before = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def end(self) -> StepMemory:
        free, _ = torch.cuda.mem_get_info()
        return StepMemory(
            static=min(self._before, torch.cuda.memory_allocated()),
            peak=torch.cuda.max_memory_allocated(),
            usable=torch.cuda.memory_reserved() + free,
        )

    def release(self) -> None:
        torch.cuda.empty_cache()


# None on a CPU, whose memory all processes of the machine share.
PROBE: MemoryProbe | None = GpuMemory() if DEVICE.type == "cuda" else None
