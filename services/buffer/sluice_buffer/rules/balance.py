"""Pure rules for which sequence goes to which rank and optimizer step.

The same lengths give the same answer on every retry.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def optimizer_steps(sequences: int, steps_per_batch: int) -> list[int]:
    """Return the optimizer step of each sequence.

    Steps are equal consecutive parts in batch order, whatever the number of ranks is.
    """
    if sequences % steps_per_batch:
        raise ValueError(
            f"{sequences} sequences cannot be split into {steps_per_batch} equal steps"
        )
    part = sequences // steps_per_batch
    return [position // part for position in range(sequences)]


@dataclass(frozen=True, slots=True)
class CostModel:
    """What training on a sequence of n tokens costs, in units of a short sequence's token.

    n (1 + n / n0), and `image_cost` for each token of an image, which passes a vision tower.

    Attributes
    ----------
    balance_tokens
        n0, the length at which attention costs as much as all else; 0 counts tokens alone.
    image_cost
        Cost of a token of an image in the tower.

    """

    balance_tokens: float = 0.0
    image_cost: float = 0.0

    def of(self, length: int, image_tokens: int = 0) -> float:
        """Return the cost of a sequence, of whose tokens so many were added by images."""
        attention = length * length / self.balance_tokens if self.balance_tokens else 0.0
        return length + attention + self.image_cost * image_tokens


BY_TOKENS = CostModel()


def balance(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each sequence: dearest first to the rank with the least work.

    LPT (Graham 1969): the loads differ by at most the dearest sequence, and no rank is empty while
    another has two. Ties go to the rank with fewer sequences, then to the lower rank.
    """
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    result = [0] * len(costs)
    for position in sorted(range(len(costs)), key=lambda p: (-costs[p], p)):
        load, count, rank = heap[0]
        result[position] = rank
        heapq.heapreplace(heap, (load + costs[position], count + 1, rank))
    return result


def assign(costs: Sequence[float], steps_per_batch: int, ranks: int) -> list[tuple[int, int]]:
    """Return (optimizer step, rank) of each sequence, balanced within each optimizer step."""
    steps = optimizer_steps(len(costs), steps_per_batch)
    part = len(costs) // steps_per_batch
    chosen: list[int] = []
    for start in range(0, len(costs), part or 1):
        chosen += balance(costs[start : start + part], ranks)
    return list(zip(steps, chosen, strict=True))
