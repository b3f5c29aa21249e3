"""Workers that ask for prompts: what each may have, and who waits for how long.

Only as many of those that wait are called up as there is something for, those with the most room
first: a thousand workers that wait cost a commit nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from sluice_buffer.core import Buffer
from sluice_buffer.group import GroupKey
from sluice_buffer.rules.admission import fair_share
from sluice_buffer.transitions.leases import LeaseCall

Transition = Callable[[], list[GroupKey]]

QUIET_SECONDS = 1.0
"""Once nobody has asked or was answered for so long, all have come that will: those that were
answered and did not ask again get no part any more. A thousand workers take seconds, one after the
other."""
SHARE_SECONDS = 5.0
"""The longest that a worker leaves the rest to others, whatever they do."""


@dataclass(slots=True, eq=False)
class PromptRequest:
    """A worker's call for prompts. places: groups that it has room for when it holds none."""

    worker: str
    places: int


class LeaseQueue:
    """Calls for prompts, and by the weight version of their workers those that wait. Belongs to one
    event loop.
    """

    def __init__(self, buffer: Buffer, clock: Callable[[], float] = time.monotonic) -> None:
        self._buffer, self._clock = buffer, clock
        self._waiting: dict[int, dict[asyncio.Future[None], PromptRequest]] = {}
        self._asking: dict[str, PromptRequest] = {}
        self._answered: dict[PromptRequest, float] = {}
        """Those of them whose calls are over, the oldest first, and until when they count."""
        self._last = -math.inf
        """When somebody asked, or was answered."""
        self._free_total: int | None = None
        """Sum of the rooms of all that ask. None: to be added up, as groups may be finished."""

    async def lease(
        self,
        call: LeaseCall,
        limit: int,
        version: int,
        seconds: float,
        run: Callable[[Transition], Awaitable[list[GroupKey]]],
    ) -> list[GroupKey]:
        """Groups for a worker that has room for `limit`, as soon as there are any for it; none
        after `seconds`, or where newer weights are there.

        With newer weights the worker asks again, for prompts of the version that it then serves.
        What is left when it has its part is the others' for a moment. run: makes a transition and
        waits until it is on the disk.
        """
        end, whole_at = self._clock() + seconds, math.inf

        def take(asking: PromptRequest) -> list[GroupKey]:
            whole = self._clock() >= whole_at
            most = limit if whole else min(limit, self._share(asking, version))
            keys = self._buffer.lease(call, most, version)
            self._add(-len(keys))
            return keys

        with self._asking_for(call.worker.name, limit) as asking:
            while True:
                keys = await run(partial(take, asking))
                now = self._clock()
                if keys or now >= end or self._news(version):
                    return keys
                wait = end - now
                if self._buffer.available(version):  # the rest is the others'
                    whole_at = min(whole_at, now + SHARE_SECONDS)
                    wait = min(wait, QUIET_SECONDS)
                else:
                    whole_at = math.inf
                await self._wait(asking, version, wait)

    # -- shares

    @contextmanager
    def _asking_for(self, worker: str, room: int) -> Iterator[PromptRequest]:
        """A call of a worker. One that was answered and has room still counts for a moment: its
        worker comes again. One that was broken off does not.
        """
        call = PromptRequest(worker, max(room, 0) + self._leased(worker))
        self._forget(self._asking.get(worker))
        self._asking[worker] = call
        self._last = self._clock()
        self._add(self._free(call))
        try:
            yield call
        except BaseException:
            self._forget(call)
            raise
        if not self._free(call):  # full: it asks again once something of it is finished
            self._forget(call)
        elif self._asking.get(worker) is call:
            self._last = self._clock()
            self._answered[call] = self._last + SHARE_SECONDS

    def _share(self, call: PromptRequest, version: int) -> int:
        """How many groups the call may get now, with weights of `version`."""
        now = self._clock()
        quiet = now >= self._last + QUIET_SECONDS
        for answered, until in list(self._answered.items()):
            if until > now and not quiet:
                break
            self._forget(answered)
        if self._free_total is None:
            self._free_total = sum(map(self._free, self._asking.values()))
        available, workers = self._buffer.available(version), len(self._asking) or 1
        return fair_share(
            self._free(call), available=available, workers=workers, free_total=self._free_total
        )

    def _leased(self, worker: str) -> int:
        return len(self._buffer.memory.leases_of.get(worker, ()))

    def _free(self, call: PromptRequest) -> int:
        """Groups that its worker has room for now."""
        return max(0, call.places - self._leased(call.worker))

    def _add(self, room: int) -> None:
        if self._free_total is not None:
            self._free_total += room

    def _forget(self, call: PromptRequest | None) -> None:
        if call is None or self._asking.get(call.worker) is not call:
            return
        del self._asking[call.worker]
        self._answered.pop(call, None)
        self._add(-self._free(call))

    # -- waiting

    async def _wait(self, call: PromptRequest, version: int, seconds: float) -> None:
        """Wait until there may be something for a worker that serves `version`,
        for at most `seconds`.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(version, {})
        queue[waiter] = call
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return
        finally:
            queue.pop(waiter, None)
            if not queue and self._waiting.get(version) is queue:
                del self._waiting[version]

    def call_up(self) -> None:
        """Let those go on for whom there is something now: prompts, newer weights, or the end."""
        self._free_total = None
        for version, queue in list(self._waiting.items()):
            count = len(queue)
            if not self._news(version):
                count = min(count, self._buffer.available(version))
            for waiter in heapq.nlargest(count, queue, key=lambda one: self._free(queue[one])):
                queue.pop(waiter)
                if not waiter.done():
                    waiter.set_result(None)

    def _news(self, version: int) -> bool:
        """True where a worker that serves `version` should be answered although there is no prompt
        for it.
        """
        return self._buffer.over or self._buffer.memory.progress.step > version
