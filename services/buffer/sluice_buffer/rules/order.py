"""Pure map from a position in the job's endless stream of prompts to (epoch, source, row).

An **epoch** takes every source's rows `weight` times: with weight 1 each row exactly once, with
weight 2 twice, with weight 0.5 half of them, and the other half in the next epoch. (A source of n
rows gives max(1, round(weight x n)) prompts to each epoch and goes through its rows in passes that
need not begin where an epoch does: no row comes up again before all rows of its source have.) With
`shuffle`, both the mixture of sources in an epoch and each pass over a source's rows have a new
order, drawn from the seed. Without it rows come in file order, and sources are spread evenly over
the epoch.

A permutation is computed for one position at a time (a Feistel network over the next power of four,
walked until it is in range; Black and Rogaway 2002), so no list of rows is kept or stored. All
arithmetic is on integers, without a library's random numbers: a job that was begun with one image
continues in the same order with another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

_ROUNDS = 6


class RowPosition(NamedTuple):
    epoch: int
    source: int
    row: int


def permute(position: int, size: int, *key: int) -> int:
    """Return the place of `position` in the permutation of range(size) that `key` selects."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    seed = ".".join(map(str, key)).encode()
    while True:
        left, right = position >> half, position & mask
        for round_ in range(_ROUNDS):
            mixed = xxhash.xxh3_64_intdigest(right.to_bytes(8, "little") + seed, seed=round_)
            left, right = right, left ^ (mixed & mask)
        position = left << half | right
        if position < size:
            return position


@dataclass(frozen=True)
class Order:
    """The prompt stream of one job.

    `sizes` and `weights` are the rows and the weight of each source.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    shuffle: bool
    seed: int

    @cached_property
    def shares(self) -> list[int]:
        """Prompts that each source gives to an epoch."""
        return [
            max(1, round(weight * size))
            for weight, size in zip(self.weights, self.sizes, strict=True)
        ]

    @cached_property
    def epoch_size(self) -> int:
        return sum(self.shares)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.shares))

    @cached_property
    def _interleaved(self) -> npt.NDArray[np.int64]:
        """Slots of an epoch without shuffle, each source's spread evenly over it."""
        fractions = np.concatenate([(np.arange(n) + 0.5) / n for n in self.shares])
        return np.argsort(fractions, kind="stable")

    def place(self, group_id: int) -> RowPosition:
        epoch, position = divmod(group_id, self.epoch_size)
        if self.shuffle:
            slot = permute(position, self.epoch_size, self.seed, epoch)
        else:
            slot = position if len(self.sizes) == 1 else int(self._interleaved[position])
        source = bisect_right(self._ends, slot)
        drawn = epoch * self.shares[source] + slot - (self._ends[source] - self.shares[source])
        source_epoch, row = divmod(drawn, self.sizes[source])
        if self.shuffle:
            row = permute(row, self.sizes[source], self.seed, source, source_epoch)
        return RowPosition(epoch, source, row)
