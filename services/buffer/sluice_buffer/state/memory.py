"""The buffer's working memory: a cache of the database, rebuilt from it at every start.

Transitions (leases.py, submits.py, batches.py, rounds.py) change this memory and note what they
changed; `flush` turns the notes into one WriteBatch. Nothing is answered before that batch is on
disk. When a write fails the memory is thrown away and loaded again, so that it can never be ahead
of the disk for long, and never differ from it.
"""

from __future__ import annotations

import heapq
import json
import struct
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from sluice_buffer.group import TRAINING, Group, GroupKey, GroupState
from sluice_buffer.rules.admission import SUSPECT_FAILURES
from sluice_buffer.state.schedule import Schedule, fresh
from sluice_buffer.state.storage import PIECE_BYTES, WriteBatch, footprint, number, pieces

PROGRESS = b"progress"
_NO_WEIGHTS = 1 << 62

Returned = list[tuple[int, int]]
"""Heap of (version of the oldest weights, id) of groups that came back: those with a partial
response first, the oldest weights first. May name groups that wait no more."""


@dataclass(slots=True)
class StoredProgress:
    """The few numbers that say where the job stands; one JSON value on disk."""

    step: int = 0
    """Last committed step, and so the weight version."""
    checkpoint_step: int = 0
    trainer_attempt: int = 0
    next_group: int = 0
    """First group that was never leased."""
    serial: int = 0
    """Number of the last evaluation round that was opened."""
    lag: float = 0.0
    """Mean of (version - oldest version of the sequence) over the last batch."""
    workers: dict[str, int] = field(default_factory=dict)
    """Newest attempt seen of each worker."""
    counters: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)
    failures: int = 0
    """Serial number of the last group that failed for good."""
    failed: Counter[str] = field(default_factory=Counter)
    """Number of groups that failed, by reason."""
    vocabulary: int = 0
    """Tokens of the model's embedding, as the trainer says at its start; 0: it has not."""


@dataclass(slots=True)
class Round:
    """One evaluation: every held-out prompt once, under the weights of `version`."""

    version: int
    serial: int
    opened: float
    groups: dict[int, Group] = field(default_factory=dict)
    waiting: Returned = field(default_factory=list)
    suspects: Returned = field(default_factory=list)
    unfinished: int = 0

    @property
    def next_group(self) -> int:
        return len(self.groups)


@dataclass(frozen=True, slots=True)
class Result:
    """One data set's evaluation."""

    version: int
    dataset: str
    metrics: dict[str, float]
    seconds: float
    examples: list[list[int]]
    """[group, bytes] of the groups whose samples are kept."""


GroupWatcher = Callable[[GroupKey, Group], None]
"""Told of each change of a group's record, before it is on the disk."""


@dataclass(slots=True)
class Memory:
    """Everything that a transition may look at."""

    progress: StoredProgress = field(default_factory=StoredProgress)
    groups: dict[int, Group] = field(default_factory=dict)
    """Training groups that are not over."""
    over: bytearray = field(default_factory=bytearray)
    """State of the groups that are over, by id; 0: not over."""
    counts: list[int] = field(default_factory=lambda: [0] * (max(GroupState) + 1))
    """Training groups in each state."""
    waiting: Returned = field(default_factory=list)
    suspects: Returned = field(default_factory=list)
    """Groups that came back and may be what ends workers (SUSPECT_FAILURES)."""
    in_work: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    schedule: Schedule = field(default_factory=Schedule)
    deadlines: dict[GroupKey, float] = field(default_factory=dict)
    leases_of: defaultdict[str, set[GroupKey]] = field(default_factory=lambda: defaultdict(set))
    """Leased groups of each worker, by its name."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Fixed batches, by step. Forgotten ones keep their ids on disk only."""
    forgotten: int = 0
    """Groups of batches that a checkpoint covers."""
    twice: int = 0
    """Groups in two committed batches, and"""
    missing: int = 0
    """groups whose record says that samples are stored which are not there: both counted on the
    disk (loading.py)."""
    rounds: dict[int, Round] = field(default_factory=dict)
    results: dict[int, list[Result]] = field(default_factory=dict)
    stored: int = 0
    largest: int = 0
    batch: WriteBatch = field(default_factory=WriteBatch)
    dirty: dict[GroupKey, Group] = field(default_factory=dict)
    changed: bool = False
    """Something must be written."""
    dropped: list[tuple[int, Group]] = field(default_factory=list)
    """Groups that the dynamic filter dropped since the last one that it kept."""
    dead_end: str = ""
    """Why no further batch can be put together, in words; empty: one can. Not on the disk: a new
    start tries again."""
    watcher: GroupWatcher | None = None

    # -- looking

    def find(self, key: GroupKey) -> Group | None:
        """The record of a group that is not over."""
        if key.round == TRAINING:
            return self.groups.get(key.group_id)
        round_ = self.rounds.get(key.round)
        return round_.groups.get(key.group_id) if round_ else None

    def over_state(self, group_id: int) -> GroupState | None:
        state = self.over[group_id] if group_id < len(self.over) else 0
        return GroupState(state) if state else None

    @property
    def kept(self) -> int:
        """Groups started that were neither filtered nor failed."""
        return (
            self.progress.next_group
            - self.counts[GroupState.FILTERED]
            - self.counts[GroupState.FAILED]
        )

    @property
    def next_batch(self) -> int:
        """The first step whose batch is not fixed. A rewind does not change it."""
        return max(self.progress.step, max(self.batches, default=0)) + 1

    @property
    def lost(self) -> int:
        """Groups that were leased once and are in no state now. Anything but 0 is a bug."""
        return self.progress.next_group - sum(self.counts) + self.missing

    @property
    def trained(self) -> int:
        """Groups in committed batches of the surviving history."""
        return self.forgotten + sum(
            len(ids) for step, ids in self.batches.items() if step <= self.progress.step
        )

    @property
    def stored_groups(self) -> int:
        """Groups whose samples wait to be trained: in no batch yet,
        or in one that is not committed.
        """
        ahead = sum(len(ids) for step, ids in self.batches.items() if step > self.progress.step)
        return len(self.finished) + ahead

    # -- changing

    def count(self, name: str, by: int = 1) -> None:
        self.progress.counters[name] += by
        self.changed = True

    def touch(self, key: GroupKey, group: Group) -> None:
        self.dirty[key] = group
        self.changed = True
        if self.watcher is not None:
            self.watcher(key, group)

    def move(self, key: GroupKey, group: Group, state: GroupState) -> None:
        """Put a group into a state and into the indexes of that state."""
        old, group.state = group.state, state
        self.touch(key, group)
        if state is not GroupState.LEASED:
            self.unlease(key, group)
            group.worker = ""
        if key.round == TRAINING:
            self.counts[old] -= 1
            self.index(key.group_id, group)
        if state is GroupState.WAITING:
            self.queue(key, group)

    def lease_to(
        self, key: GroupKey, group: Group, worker: str, worker_attempt: int, deadline: float
    ) -> None:
        """Note who works on a leased group, and until when."""
        group.worker, group.worker_attempt = worker, worker_attempt
        self.deadlines[key] = deadline
        self.leases_of[worker].add(key)

    def unlease(self, key: GroupKey, group: Group) -> None:
        """Forget who works on a group."""
        self.deadlines.pop(key, None)
        self.leases_of[group.worker].discard(key)

    def queue(self, key: GroupKey, group: Group) -> None:
        """Put a group that came back where the next worker looks for it."""
        queues = self if key.round == TRAINING else self.rounds[key.round]
        heap = queues.suspects if is_suspect(group) else queues.waiting
        heapq.heappush(heap, (urgency(group), key.group_id))

    def start(self, key: GroupKey, version: int) -> Group:
        """The record of a group that is leased for the first time, by a worker with weights
        `version`.
        """
        group = Group(GroupState.LEASED, version=version)
        if key.round == TRAINING:
            self.progress.next_group = key.group_id + 1
            self.index(key.group_id, group)
        else:
            self.rounds[key.round].groups[key.group_id] = group
        self.touch(key, group)
        return group

    def index(self, group_id: int, group: Group) -> None:
        """Count a training group and put it where its state says."""
        state = group.state
        self.counts[state] += 1
        if state.over:
            self.groups.pop(group_id, None)
            self.over.extend(bytes(max(0, group_id + 1 - len(self.over))))
            self.over[group_id] = state
            group.summary = b""
        else:
            self.groups[group_id] = group
        (self.in_work.add if state.in_work else self.in_work.discard)(group_id)
        (self.finished.add if state is GroupState.FINISHED else self.finished.discard)(group_id)
        self.schedule.put(group_id, group)

    def revive(self, group_id: int, group: Group) -> None:
        """Let a group that failed or was filtered wait for a worker again, as if it were new."""
        self.over[group_id] = 0
        group.failures, group.note = 0, ""
        self.move(GroupKey(TRAINING, group_id), group, GroupState.WAITING)

    def store(self, table: str, key: GroupKey, group: Group, value: bytes | bytearray) -> None:
        """Store a group's samples, in pieces, in the place of nothing:
        `discard` what was there first.
        """
        for position, piece in enumerate(pieces(value)):
            self.batch.put(table, _piece_key(key, position), piece)
        group.size = len(value)
        self.stored += footprint(group.size)
        self.largest = max(self.largest, footprint(group.size))
        self.changed = True

    def discard(self, table: str, key: GroupKey, group: Group) -> None:
        """Delete what `store` stored for the group, if anything."""
        if group.size:
            self.remove(table, key, group.size)
            group.size = 0
            self.touch(key, group)

    def remove(self, table: str, key: GroupKey, size: int) -> None:
        for position in range(len(range(0, size, PIECE_BYTES))):
            self.batch.delete(table, _piece_key(key, position))
        self.stored -= footprint(size)
        self.changed = True

    def flush(self) -> WriteBatch:
        """Everything that changed since the last flush."""
        batch, self.batch = self.batch, WriteBatch()
        for key, group in self.dirty.items():
            if key.round == TRAINING:
                batch.put("groups", number(key.group_id), group.pack())
            elif key.round in self.rounds:
                batch.put("round_groups", number(*key), group.pack())
        if self.changed:
            batch.put(
                "meta",
                PROGRESS,
                json.dumps(
                    {f.name: getattr(self.progress, f.name) for f in fields(StoredProgress)}
                ).encode(),
            )
        self.dirty, self.changed = {}, False
        return batch


def is_suspect(group: Group) -> bool:
    """True for a group that may be what ends workers."""
    return group.failures >= SUSPECT_FAILURES


def urgency(group: Group) -> int:
    """The place of a group among those that came back."""
    return _NO_WEIGHTS if fresh(group) else group.version


def _piece_key(key: GroupKey, position: int) -> bytes:
    return value_key(key) + position.to_bytes(4, "big")


def value_key(key: GroupKey) -> bytes:
    """Prefix of the pieces of a group's samples."""
    return number(key.group_id) if key.round == TRAINING else b"e" + number(*key)


def pack_ids(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


def unpack_ids(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 8}q", data))
