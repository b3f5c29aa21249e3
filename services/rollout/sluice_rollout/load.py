"""A worker's load: the samples that it has to generate, and whether they are the tail of a batch.

A synchronous step waits for the longest response of its batch, with an engine that runs ever fewer
of them: its *tail*, as in long-tailed lengths. More engines do not shorten it, asynchronous mode
fills it with the next batch's samples, so it is told apart from `generating`.

Samples are counted, not the requests at the engine: an episode whose tools run has none there and
asks again, and a batch of such episodes is in full swing with few requests at a time. One counts
until its last token; what is still scored then needs no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

TAIL_SHARE = 0.25
"""Of the most samples since the worker had none; with fewer it is in the tail."""


def is_tail(samples: int, peak: int, *, waits: bool) -> bool:
    """True where so few of a batch's samples are left, and there is nothing to put beside them.

    samples: that are generated now. peak: the most of them since the worker had none. waits: it
    has asked the buffer for more groups and gets none, because all of the batch are leased.
    """
    return waits and samples < TAIL_SHARE * peak


@dataclass(slots=True)
class Load:
    """One worker's samples, and since when they are a tail. less: set where some were generated.

    batches: a batch is begun when the one before it is trained (rollout.mode: sync). In
    asynchronous mode later ones are begun beside it, and none has a tail: a worker that waits with
    few samples is ahead of its trainer, or held up by `maxStaleness`.
    """

    batches: bool = True
    clock: Callable[[], float] = time.monotonic
    samples: int = 0
    peak: int = 0
    waits: bool = False
    less: asyncio.Event = field(default_factory=asyncio.Event)
    _since: float | None = None

    def group(self, count: int) -> Share:
        """A group more, of so many samples."""
        share = Share(self)
        share.expect(count)
        return share

    def leasing(self, *, waits: bool) -> None:
        """A lease is asked for, and not there yet (waits); or groups have come with it."""
        self.waits = waits
        self._change(0)

    def state(self, *, work: bool) -> str:
        """`idle`, `generating` or `tail`. work: there are groups in work."""
        if not work:
            return "idle"
        return "generating" if self._since is None else "tail"

    @property
    def tail_seconds(self) -> float:
        """For which the tail has lasted; 0: it is none."""
        return 0.0 if self._since is None else self.clock() - self._since

    def _change(self, samples: int) -> None:
        if samples > 0 and not self.samples:
            self.peak = 0
        self.samples += samples
        self.peak = max(self.peak, self.samples)
        if samples < 0:
            self.less.set()
        if not self.batches or not is_tail(self.samples, self.peak, waits=self.waits):
            self._since = None
        elif self._since is None:
            self._since = self.clock()


@dataclass(slots=True)
class Share:
    """One group's part of its worker's load: its samples that are still to be generated."""

    load: Load
    left: int = 0

    def expect(self, count: int) -> None:
        """It has so many."""
        change, self.left = max(count, 0) - self.left, max(count, 0)
        self.load._change(change)

    def done(self, count: int) -> None:
        """So many are generated."""
        self.expect(self.left - count)


SHARE: ContextVar[Share] = ContextVar("share", default=Share(Load()))  # noqa: B039 - of who has none
"""That of the group which this task, and all that it starts, makes."""
