"""Leases of groups: grant, extend, take back.

A lease is durable, its deadline is not: a restart of the buffer gives every lease its full time
again, because workers could not reach the buffer meanwhile. The owner of a lease is (worker,
attempt). When a worker comes with a newer attempt, the process that held the older leases is gone,
and they are free at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from sluice_buffer.errors import PreconditionError, StaleAttemptError
from sluice_buffer.group import TRAINING, Group, GroupKey, GroupState, LeaseName, lease_id
from sluice_buffer.rules.admission import MAX_FAILURES, AdmissionPolicy, may_continue, may_start
from sluice_buffer.rules.staleness import places_left
from sluice_buffer.state.memory import Memory, Returned, Round, is_suspect, urgency
from sluice_buffer.state.schedule import fresh


@dataclass(frozen=True, slots=True)
class WorkerAttempt:
    name: str
    attempt: int


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """A worker's call for leases.

    Parameters
    ----------
    number
        Grows with each call of a session.
    held
        Ids of all leases that have reached the worker.
    session
        Identifies the process of the worker.

    """

    worker: WorkerAttempt
    number: int = 0
    held: frozenset[str] = frozenset()
    session: int = 0


# The buffer itself, if it makes the samples of a batch (sources/local_groups.py).
LOCAL_WORKER = WorkerAttempt("filler", 1)

# Called with a group that will never be finished, and why.
OnGivenUp = Callable[[GroupKey, Group, str], None]


@dataclass(slots=True)
class Leases:
    """The transitions of leases on one memory."""

    memory: Memory
    policy: AdmissionPolicy
    lease_seconds: float
    round_size: int
    give_up: OnGivenUp
    # True if the buffer makes the training samples: workers then get evaluations alone.
    local_samples: bool = False
    # Session and number of the newest call of each worker.
    calls: dict[WorkerAttempt, tuple[int, int]] = field(default_factory=dict)

    def admit(self, worker: WorkerAttempt) -> None:
        """Refuse a worker of an older attempt; free the leases of its older attempts."""
        newest = self.memory.progress.workers.get(worker.name, 0)
        if worker.attempt < newest:
            raise StaleAttemptError(
                f"{worker.name} attempt {worker.attempt} was replaced by attempt {newest}"
            )
        if worker.attempt > newest:
            self.memory.progress.workers[worker.name] = worker.attempt
            self.memory.changed = True
            for key in sorted(self.memory.leases_of[worker.name]):
                group = self.memory.find(key)
                if group and group.worker_attempt < worker.attempt:
                    self.release(
                        key, group, f"{worker.name} attempt {group.worker_attempt} was replaced"
                    )

    def lease(self, call: LeaseCall, limit: int, worker_version: int, now: float) -> list[GroupKey]:
        """Lease groups to a worker.

        In this order: leases whose answer was lost, evaluation, groups that came back, new ones. At
        most `limit`, not counting the lost ones. Raises PreconditionError if a later call has
        overtaken this one: its answer would not be read.
        """
        worker = call.worker
        self.admit(worker)
        session, newest = self.calls.get(worker, (call.session, 0))
        if session == call.session and call.number < newest:
            raise PreconditionError(
                f"call {call.number} of {worker.name} was overtaken by a later one"
            )
        self.calls[worker] = call.session, call.number
        lost = self._not_arrived(call)
        for key in lost:
            self.memory.deadlines[key] = now + self.lease_seconds
        training = () if self.local_samples else self._training(worker, worker_version)
        candidates = chain(self._evaluation(worker, worker_version), training)
        return lost + self._take(candidates, worker, limit - len(lost), worker_version, now)

    def fill(self, limit: int, version: int) -> list[GroupKey]:
        """Lease up to `limit` training groups to the buffer itself, without a deadline."""
        return self._take(
            self._training(LOCAL_WORKER, version), LOCAL_WORKER, limit, version, math.inf
        )

    def available(self, worker_version: int) -> int:
        """Return how many groups there are for workers that serve `worker_version`."""
        memory = self.memory
        rounds = (round_ for version, round_ in memory.rounds.items() if version <= worker_version)
        count = sum(
            len(r.waiting) + len(r.suspects) + self.round_size - r.next_group for r in rounds
        )
        if self.local_samples:
            return count
        return count + self._may_continue(worker_version) + self.may_start(worker_version)

    def _not_arrived(self, call: LeaseCall) -> list[GroupKey]:
        """Return leases of the worker that have not reached it."""
        keys = sorted(self.memory.leases_of[call.worker.name])
        return [key for key in keys if self.lease_id(key) not in call.held]

    def lease_id(self, key: GroupKey) -> str:
        """Return the id of a group's present lease."""
        group = self.memory.find(key)
        serial = 0 if key.round == TRAINING else self.memory.rounds[key.round].serial
        return lease_id(key, serial, group.lease_attempt if group else 0)

    def _take(
        self,
        candidates: Iterable[GroupKey],
        worker: WorkerAttempt,
        limit: int,
        worker_version: int,
        now: float,
    ) -> list[GroupKey]:
        """Lease the first candidates.

        Each is leased before the next is requested from the iterator, which depends on it.
        """
        keys: list[GroupKey] = []
        for key in candidates if limit > 0 else ():
            if len(keys) >= limit:
                break
            self._hand_out(key, worker, worker_version, now)
            keys.append(key)
        return keys

    def _evaluation(self, worker: WorkerAttempt, worker_version: int) -> Iterator[GroupKey]:
        for version in sorted(v for v in self.memory.rounds if v <= worker_version):
            round_ = self.memory.rounds[version]
            for group_id in self._returned(worker, round_, round_.groups, lambda _: True):
                yield GroupKey(version, group_id)
            while round_.next_group < self.round_size:
                yield GroupKey(version, round_.next_group)

    def _training(self, worker: WorkerAttempt, worker_version: int) -> Iterator[GroupKey]:
        memory = self.memory

        def allowed(group: Group) -> bool:
            return self._allowed(group, worker_version)

        for group_id in self._returned(worker, memory, memory.groups, allowed):
            yield GroupKey(TRAINING, group_id)
        while self.may_start(worker_version):
            yield GroupKey(TRAINING, memory.progress.next_group)

    def _returned(
        self,
        worker: WorkerAttempt,
        queues: Memory | Round,
        groups: Mapping[int, Group],
        allowed: Callable[[Group], bool],
    ) -> Iterator[int]:
        """Yield groups that came back, in the order of their heaps, up to the first not allowed.

        A worker gets at most one suspect.
        """
        suspect = _first(queues.suspects, groups, suspects=True)
        if suspect is not None and not self._has_suspect(worker) and allowed(groups[suspect]):
            yield suspect
        while (group_id := _first(queues.waiting, groups, suspects=False)) is not None:
            if not allowed(groups[group_id]):
                return
            yield group_id

    def _allowed(self, group: Group, worker_version: int) -> bool:
        """True if a worker that serves `worker_version` may take a training group that came back.

        A partial response keeps its due step only if it is not continued with older weights.
        """
        if not self.policy.strict:
            version = self.memory.progress.step
            return may_continue(self.policy, version=version, worker_version=worker_version)
        if fresh(group):
            return self._places_left(worker_version) > 0
        return worker_version >= group.version

    def _may_continue(self, worker_version: int) -> int:
        """Return how many of the training groups that came back are allowed for a worker."""
        memory, waiting = self.memory, self.memory.counts[GroupState.WAITING]
        if not waiting:
            return 0
        if not self.policy.strict:
            version = memory.progress.step
            allowed = may_continue(self.policy, version=version, worker_version=worker_version)
            return waiting if allowed else 0
        begun = memory.schedule.counts(GroupState.WAITING)
        if begun and worker_version < max(begun):
            return sum(count for version, count in begun.items() if version <= worker_version)
        return begun.total() + min(waiting - begun.total(), self._places_left(worker_version))

    def _places_left(self, worker_version: int) -> int:
        """Return how many more groups may begin with the weights of a worker, in strict mode."""
        return places_left(
            self.policy,
            step=self.memory.next_batch,
            version=worker_version,
            outstanding=self.memory.schedule.outstanding(),
        )

    def _has_suspect(self, worker: WorkerAttempt) -> bool:
        leased = (self.memory.find(key) for key in self.memory.leases_of[worker.name])
        return any(group is not None and is_suspect(group) for group in leased)

    def may_start(self, worker_version: int) -> int:
        return may_start(
            self.policy,
            version=self.memory.progress.step,
            worker_version=worker_version,
            kept=self.memory.kept,
            next_group=self.memory.progress.next_group,
        )

    def _hand_out(
        self, key: GroupKey, worker: WorkerAttempt, worker_version: int, now: float
    ) -> None:
        group = self.memory.find(key)
        if group is None:
            group = self.memory.start(key, worker_version)
        else:
            if not group.size:  # with a partial response its oldest token counts
                group.version = worker_version
            self.memory.move(key, group, GroupState.LEASED)
        group.lease_attempt += 1
        self.memory.lease_to(key, group, worker.name, worker.attempt, now + self.lease_seconds)
        self.memory.count("leases_granted")

    def heartbeat(
        self, worker: WorkerAttempt, names: list[tuple[str, LeaseName | None]], now: float
    ) -> list[str]:
        """Extend leases, and return the ids of those that the worker does not hold any more."""
        self.admit(worker)
        drop: list[str] = []
        for text, name in names:
            group = self.memory.find(name.key) if name else None
            if name and group and self._holds(group, name, worker) and self._same_round(name):
                self.memory.deadlines[name.key] = now + self.lease_seconds
            elif not (
                name and group and group.lease_attempt == name.attempt and not group.state.in_work
            ):
                drop.append(
                    text
                )  # finished groups are not dropped: the answer to their submit may be on its way
        return drop

    def extend(self, group: Group, now: float) -> None:
        """Extend all leases of the worker that holds a group, because its call is being answered.

        It cannot send heartbeats for leases that it has not heard of yet.
        """
        for key in self.memory.leases_of[group.worker]:
            self.memory.deadlines[key] = now + self.lease_seconds

    def _holds(self, group: Group, name: LeaseName, worker: WorkerAttempt) -> bool:
        owner = (group.worker, group.worker_attempt)
        return (
            group.state is GroupState.LEASED
            and group.lease_attempt == name.attempt
            and owner == (worker.name, worker.attempt)
        )

    def _same_round(self, name: LeaseName) -> bool:
        return (
            name.key.round == TRAINING or self.memory.rounds[name.key.round].serial == name.serial
        )

    def expire(self, now: float) -> int:
        """Take back the leases whose deadline has passed."""
        late = [key for key, deadline in self.memory.deadlines.items() if deadline <= now]
        for key in late:
            group = self.memory.find(key)
            if group:
                self.memory.count("leases_expired")
                self.release(key, group, f"the lease of {group.worker} ran out")
        return len(late)

    def release(self, key: GroupKey, group: Group, why: str, *, blame: bool = True) -> None:
        """Take a group back unfinished.

        It goes to the next worker that asks, or fails after it came back too often. `blame` counts
        this time.
        """
        if blame:
            group.failures += 1
        if group.failures >= MAX_FAILURES:
            self.give_up(key, group, why)
        else:
            self.memory.move(key, group, GroupState.WAITING)


def _first(heap: Returned, groups: Mapping[int, Group], *, suspects: bool) -> int | None:
    """Return the first waiting group of a heap; outdated entries are removed on the way."""
    while heap:
        entry, group_id = heap[0]
        group = groups.get(group_id)
        waits = group is not None and group.state is GroupState.WAITING
        if group and waits and is_suspect(group) is suspects and urgency(group) == entry:
            return group_id
        heapq.heappop(heap)
    return None
