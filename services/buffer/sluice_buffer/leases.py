"""Who works on which group: hand out, extend, take back.

A lease is durable, its deadline is not: a restart of the buffer gives every lease its full time again, which is what a
worker needs that could not reach us. The owner of a lease is (worker, attempt); when a worker comes with a newer
attempt, the process that held the older leases is gone, and they are free at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from sluice_buffer.admission import MAX_FAILURES, Policy, may_continue, may_start
from sluice_buffer.errors import StaleAttemptError
from sluice_buffer.memory import Memory, Round
from sluice_buffer.state import TRAINING, Group, GroupState, Key, LeaseName


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    attempt: int


FILLER = Worker("filler", 1)
"""The buffer itself, where it makes the samples of a batch (filling.py)."""

GiveUp = Callable[[Key, Group, str], None]
"""Called with a group that will never be finished, and why."""


@dataclass(slots=True)
class Leases:
    """The transitions of leases on one memory."""

    memory: Memory
    policy: Policy
    lease_seconds: float
    round_size: int
    give_up: GiveUp
    filled: bool = False
    """The buffer makes the training samples itself: workers get evaluations alone."""

    def admit(self, worker: Worker) -> None:
        """Refuse a worker of an older attempt; free what an older attempt held."""
        known = self.memory.progress.workers.get(worker.name, 0)
        if worker.attempt < known:
            raise StaleAttemptError(f"{worker.name} attempt {worker.attempt}: attempt {known} has been here")
        if worker.attempt > known:
            self.memory.progress.workers[worker.name] = worker.attempt
            self.memory.changed = True
            for key in list(self.memory.deadlines):
                group = self.memory.find(key)
                if group and group.worker == worker.name and group.worker_attempt < worker.attempt:
                    self.release(key, group, f"{worker.name} attempt {group.worker_attempt} was replaced")

    def lease(self, worker: Worker, limit: int, worker_version: int, now: float) -> list[Key]:
        """Up to `limit` groups for a worker: evaluation, then what came back, then new ones."""
        training = () if self.filled else self._training(worker_version)
        return self._take(chain(self._evaluation(worker_version), training), worker, limit, worker_version, now)

    def fill(self, limit: int, version: int) -> list[Key]:
        """Up to `limit` training groups for the buffer itself; their leases do not run out."""
        return self._take(self._training(version), FILLER, limit, version, math.inf)

    def _take(
        self, candidates: Iterable[Key], worker: Worker, limit: int, worker_version: int, now: float
    ) -> list[Key]:
        """The first candidates. Each is handed out before the next is asked for."""
        self.admit(worker)
        keys: list[Key] = []
        for key in candidates:
            if len(keys) >= limit:
                break
            self._hand_out(key, worker, worker_version, now)
            keys.append(key)
        return keys

    def _evaluation(self, worker_version: int) -> Iterator[Key]:
        for version in sorted(v for v in self.memory.rounds if v <= worker_version):
            yield from self._of_round(self.memory.rounds[version])

    def _training(self, worker_version: int) -> Iterator[Key]:
        version = self.memory.progress.step
        if may_continue(self.policy, version=version, worker_version=worker_version):
            while (group_id := self._next_waiting()) is not None:
                yield Key(TRAINING, group_id)
        while self.may_start(worker_version):
            yield Key(TRAINING, self.memory.progress.next_group)

    def may_start(self, worker_version: int) -> int:
        return may_start(
            self.policy,
            version=self.memory.progress.step,
            worker_version=worker_version,
            kept=self.memory.kept,
            next_group=self.memory.progress.next_group,
        )

    def _of_round(self, found: Round) -> Iterator[Key]:
        while found.waiting:
            if found.groups[found.waiting[0]].state is GroupState.WAITING:
                yield Key(found.version, found.waiting[0])
            heapq.heappop(found.waiting)
        while found.next_group < self.round_size:
            yield Key(found.version, found.next_group)

    def _next_waiting(self) -> int | None:
        """The lowest training group that waits; what the heap still has of others is dropped on the way."""
        heap = self.memory.waiting
        while heap:
            group = self.memory.groups.get(heap[0])
            if group and group.state is GroupState.WAITING:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _hand_out(self, key: Key, worker: Worker, worker_version: int, now: float) -> None:
        group = self.memory.find(key)
        if group is None:
            group = self.memory.start(key)
        else:
            self.memory.move(key, group, GroupState.LEASED)
        if not group.size:  # with a partial response its oldest token counts
            group.version = worker_version
        group.lease_attempt += 1
        group.worker, group.worker_attempt = worker.name, worker.attempt
        self.memory.deadlines[key] = now + self.lease_seconds
        self.memory.count("leases_granted")

    def heartbeat(self, worker: Worker, names: list[tuple[str, LeaseName | None]], now: float) -> list[str]:
        """Extend the leases; the ids of those that the worker holds no more and should drop."""
        self.admit(worker)
        drop: list[str] = []
        for text, name in names:
            group = self.memory.find(name.key) if name else None
            if name and group and self._holds(group, name, worker) and self._same_round(name):
                self.memory.deadlines[name.key] = now + self.lease_seconds
            elif not (name and group and group.lease_attempt == name.attempt and not group.state.in_work):
                drop.append(text)  # finished ones are not dropped: their submit may still be on its way back
        return drop

    def _holds(self, group: Group, name: LeaseName, worker: Worker) -> bool:
        owner = (group.worker, group.worker_attempt)
        return (
            group.state is GroupState.LEASED
            and group.lease_attempt == name.attempt
            and owner == (worker.name, worker.attempt)
        )

    def _same_round(self, name: LeaseName) -> bool:
        return name.key.round == TRAINING or self.memory.rounds[name.key.round].serial == name.serial

    def expire(self, now: float) -> int:
        """Take back the leases whose deadline has passed."""
        late = [key for key, deadline in self.memory.deadlines.items() if deadline <= now]
        for key in late:
            group = self.memory.find(key)
            if group:
                self.memory.count("leases_expired")
                self.release(key, group, f"the lease of {group.worker} ran out")
        return len(late)

    def release(self, key: Key, group: Group, why: str, *, blame: bool = True) -> None:
        """Take a group back unfinished; it goes to the next worker that asks, or is failed after too many times."""
        if blame:
            group.failures += 1
        if group.failures > MAX_FAILURES:
            self.give_up(key, group, f"given up after {group.failures} leases without progress; the last: {why}")
        else:
            self.memory.move(key, group, GroupState.WAITING)
