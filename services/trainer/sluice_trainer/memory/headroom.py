"""The size that micro-batches may have, from the memory that a training step took."""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 0.2
"""Of the usable memory that stays free: for steps whose rows hold other sequences, for what an
allocator cannot use of its blocks, for buffers of collectives that are made later."""
STAGE_MICRO_BATCHES = 4
"""Micro-batches for each pipeline stage that have to remain: with fewer of them stages idle for
more than a fifth of a step."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a GPU in a training step, as this process sees them.

    static: allocated before it and after it, the lesser of the two; peak: the most that was
    allocated in it; usable: all that the process may allocate, which is what it holds and what is
    free.
    """

    static: int
    peak: int
    usable: int


@dataclass(frozen=True, slots=True)
class Ran:
    """The work of a training step in that memory.

    tokens: of the largest micro-batch, on this GPU; batches: micro-batches of an optimizer step;
    stages: of the pipeline.
    """

    tokens: int
    batches: int
    stages: int = 1


def next_size(ran: Ran, memory: Memory, size: int, most: int) -> int | None:
    """Tokens that the next step's micro-batches may have: twice `size`, or `size`, where no more
    fits. None: this step does not tell.

    All beside what is static is taken to grow as the tokens do, from those that really ran.
    Gradients and chunks of logits do not, so that the answer errs towards less. A step without a
    large micro-batch tells nothing, nor does one whose micro-batches are too few to be made fewer:
    of a pipeline, such a step has not filled the stages, whose activations then add up.
    """
    larger = min(2 * size, most)
    if larger <= size:
        return size
    least = 2 if ran.stages == 1 else 2 * STAGE_MICRO_BATCHES * ran.stages
    if 2 * ran.tokens < size or ran.batches < least:
        return None
    needed = memory.static + (memory.peak - memory.static) * larger / ran.tokens
    return larger if needed <= (1 - MARGIN) * memory.usable else size
