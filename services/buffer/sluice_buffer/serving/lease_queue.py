"""Workers that ask for prompts: how many each gets, and which of them wait for how long.

Only as many waiting workers are woken as there are groups for, those with the most room first: a
thousand workers that wait add nothing to the cost of a commit.
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

# If no worker has asked or was answered for so long, all have come that will: workers that were
# answered and did not ask again lose their share. A thousand workers take seconds, one after the
# other.
QUIET_SECONDS = 1.0
# Longest time that a worker leaves the rest of the groups to others.
SHARE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class PromptRequest:
    """A worker's call for prompts.

    `places` is the number of groups that the worker has room for when it is idle.
    """

    worker: str
    places: int


class LeaseQueue:
    """Calls for prompts, and those of them that wait, by the weight version of their workers.

    Belongs to one event loop.
    """

    def __init__(self, buffer: Buffer, clock: Callable[[], float] = time.monotonic) -> None:
        self._buffer, self._clock = buffer, clock
        self._waiting: dict[int, dict[asyncio.Future[None], PromptRequest]] = {}
        self._asking: dict[str, PromptRequest] = {}
        # Requests whose calls are over, the oldest first, and the time until which they count.
        self._answered: dict[PromptRequest, float] = {}
        # When a worker last asked or was answered.
        self._last = -math.inf
        # Sum of the room of all workers that ask; None if it must be computed, as groups may be
        # finished.
        self._free_total: int | None = None

    async def lease(
        self,
        call: LeaseCall,
        limit: int,
        version: int,
        seconds: float,
        run: Callable[[Transition], Awaitable[list[GroupKey]]],
    ) -> list[GroupKey]:
        """Lease groups for a worker as soon as there are any for it.

        The result is empty after `seconds`, or if newer weights exist: the worker asks again once
        it serves them. Groups beyond the worker's share are left to others for a moment.

        Parameters
        ----------
        call
            The worker's call.
        limit
            Groups that the worker has room for.
        version
            Weight version that the worker serves.
        seconds
            Longest wait.
        run
            Runs a transition and waits until it is on the disk.

        """
        end = self._clock() + seconds
        rest_at = math.inf  # when the worker may take more than its share

        def take(request: PromptRequest) -> list[GroupKey]:
            takes_rest = self._clock() >= rest_at
            allowed = limit if takes_rest else min(limit, self._share(request, version))
            keys = self._buffer.lease(call, allowed, version)
            self._add(-len(keys))
            return keys

        with self._asking_for(call.worker.name, limit) as request:
            while True:
                keys = await run(partial(take, request))
                now = self._clock()
                if keys or now >= end or self._news(version):
                    return keys
                wait = end - now
                if self._buffer.available(version):  # left to the others for now
                    rest_at = min(rest_at, now + SHARE_SECONDS)
                    wait = min(wait, QUIET_SECONDS)
                else:
                    rest_at = math.inf
                await self._wait(request, version, wait)

    # -- shares

    @contextmanager
    def _asking_for(self, worker: str, limit: int) -> Iterator[PromptRequest]:
        """Count a worker's call among those that ask.

        A worker that was answered and has room left still counts for a moment, because it will ask
        again. A call that was cancelled does not count.
        """
        call = PromptRequest(worker, max(limit, 0) + self._leased(worker))
        self._forget(self._asking.get(worker))
        self._asking[worker] = call
        self._last = self._clock()
        self._add(self._free(call))
        try:
            yield call
        except BaseException:
            self._forget(call)
            raise
        if not self._free(call):  # full: the worker asks again once a group of it is finished
            self._forget(call)
        elif self._asking.get(worker) is call:
            self._last = self._clock()
            self._answered[call] = self._last + SHARE_SECONDS

    def _share(self, call: PromptRequest, version: int) -> int:
        """Return how many groups the call may get now, with weights of `version`."""
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
        """Return the groups that the worker has room for now."""
        return max(0, call.places - self._leased(call.worker))

    def _add(self, free: int) -> None:
        if self._free_total is not None:
            self._free_total += free

    def _forget(self, call: PromptRequest | None) -> None:
        if call is None or self._asking.get(call.worker) is not call:
            return
        del self._asking[call.worker]
        self._answered.pop(call, None)
        self._add(-self._free(call))

    # -- waiting

    async def _wait(self, call: PromptRequest, version: int, seconds: float) -> None:
        """Wait at most `seconds` until there may be groups for a worker that serves `version`."""
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
        """Wake the workers that there is an answer for: prompts, newer weights, or the end."""
        self._free_total = None
        for version, queue in list(self._waiting.items()):
            count = len(queue)
            if not self._news(version):
                count = min(count, self._buffer.available(version))
            for waiter in heapq.nlargest(
                count, queue, key=lambda future: self._free(queue[future])
            ):
                queue.pop(waiter)
                if not waiter.done():
                    waiter.set_result(None)

    def _news(self, version: int) -> bool:
        """True if a worker that serves `version` should be answered without a prompt."""
        return self._buffer.over or self._buffer.memory.progress.step > version
