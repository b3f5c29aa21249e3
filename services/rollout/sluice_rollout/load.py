"""The load of a worker: its samples that are still to be generated, and whether they are a tail.

A synchronous step waits for the longest response of its batch, while the engine runs fewer and
fewer samples: the *tail* of the batch. More engines do not shorten a tail; asynchronous mode fills
it with samples of the next batch. `sluice status` therefore tells `tail` from `generating`.

Samples are counted, not requests at the engine: an episode whose tools run has no request there
but will send another one, so a batch of such episodes can be busy with few requests. A sample
counts until its last token. Scoring needs no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

# A worker is in the tail with fewer samples than this fraction of the most since it was last idle.
TAIL_FRACTION = 0.25


def is_tail(samples: int, peak: int, *, waiting: bool) -> bool:
    """Return True if few samples of a batch are left and no other group can be started.

    Parameters
    ----------
    samples
        Samples that are generated now.
    peak
        The most samples since the worker was last idle.
    waiting
        True if the worker waits for more groups, because the whole batch is leased.

    """
    return waiting and samples < TAIL_FRACTION * peak


@dataclass(slots=True)
class Load:
    """The samples that one worker has to generate, and how long they have been a tail."""

    # True if a batch begins once the one before is trained (rollout.mode: sync). In asynchronous
    # mode later batches overlap and there is no tail: a worker that waits with few samples is
    # ahead of its trainer, or held up by `maxStaleness`.
    synchronous: bool = True
    clock: Callable[[], float] = time.monotonic
    samples: int = 0
    peak: int = 0
    waiting: bool = False
    # Set when samples are generated, that is when there may be room for another group.
    decreased: asyncio.Event = field(default_factory=asyncio.Event)
    _tail_since: float | None = None

    def add_group(self, count: int) -> GroupLoad:
        """Count a new group of `count` samples."""
        group_load = GroupLoad(self)
        group_load.expect(count)
        return group_load

    def note_lease(self, *, waiting: bool) -> None:
        """Note that a lease is requested and pending, or that it has brought groups."""
        self.waiting = waiting
        self._change(0)

    def state(self, *, has_groups: bool) -> str:
        """Return `idle`, `generating` or `tail`. A worker without groups is idle."""
        if not has_groups:
            return "idle"
        return "generating" if self._tail_since is None else "tail"

    @property
    def tail_seconds(self) -> float:
        """Duration of the present tail; 0 without a tail."""
        return 0.0 if self._tail_since is None else self.clock() - self._tail_since

    def _change(self, samples: int) -> None:
        if samples > 0 and not self.samples:
            self.peak = 0
        self.samples += samples
        self.peak = max(self.peak, self.samples)
        if samples < 0:
            self.decreased.set()
        if not self.synchronous or not is_tail(self.samples, self.peak, waiting=self.waiting):
            self._tail_since = None
        elif self._tail_since is None:
            self._tail_since = self.clock()


@dataclass(slots=True)
class GroupLoad:
    """The samples of one group that are still to be generated, as a part of its worker's load."""

    load: Load
    left: int = 0

    def expect(self, count: int) -> None:
        """Set the number of samples that are left."""
        change, self.left = max(count, 0) - self.left, max(count, 0)
        self.load._change(change)

    def done(self, count: int) -> None:
        """Note that `count` samples are generated."""
        self.expect(self.left - count)


# The load of the group that the current task, and every task that it starts, works on. The default
# serves code outside of a group.
GROUP_LOAD: ContextVar[GroupLoad] = ContextVar("group_load", default=GroupLoad(Load()))  # noqa: B039
