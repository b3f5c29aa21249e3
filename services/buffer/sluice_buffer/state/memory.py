"""The buffer's working memory: a cache of the database, rebuilt from it at every start.

Transitions (leases.py, submits.py, batches.py, rounds.py) change this memory and note their
changes; `flush` turns the notes into one WriteBatch. No call is answered before that batch is on
disk. After a failed write the memory is thrown away and loaded again, so it can never stay ahead of
the disk or differ from it.
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
from sluice_buffer.state.images import ImageIndex
from sluice_buffer.state.schedule import Schedule, fresh
from sluice_buffer.state.storage import (
    PIECE_BYTES,
    WriteBatch,
    footprint,
    number,
    pieces,
    value_key,
)

PROGRESS = b"progress"
_NO_WEIGHTS = 1 << 62

# Heap of (version of the oldest weights, id) of groups that came back: those with a partial
# response first, the oldest weights first. It may name groups that no longer wait.
Returned = list[tuple[int, int]]


@dataclass(slots=True)
class StoredProgress:
    """The few numbers that describe the progress of the job; one JSON value on disk."""

    # Last committed step, and so the weight version.
    step: int = 0
    checkpoint_step: int = 0
    trainer_attempt: int = 0
    # First group that was never leased.
    next_group: int = 0
    # Number of the last evaluation round that was opened.
    serial: int = 0
    # Mean of (version - oldest version of the sequence) over the last batch.
    lag: float = 0.0
    # Newest attempt of each worker.
    workers: dict[str, int] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)
    # Serial number of the last group that failed for good.
    failures: int = 0
    # Number of failed groups by reason.
    failed: Counter[str] = field(default_factory=Counter)
    # Tokens of the model's embedding, which the trainer sends at its start; 0 before that.
    vocabulary: int = 0


@dataclass(slots=True)
class Round:
    """An evaluation: every held-out prompt once, under the weights of `version`."""

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
    """The evaluation of one data set."""

    version: int
    dataset: str
    metrics: dict[str, float]
    seconds: float
    # [group, bytes] of the groups whose samples are kept.
    examples: list[list[int]]


# Called on each change of a group's record, before it is on the disk.
GroupWatcher = Callable[[GroupKey, Group], None]


@dataclass(slots=True)
class Memory:
    """All state that transitions read and change."""

    progress: StoredProgress = field(default_factory=StoredProgress)
    # Training groups that are not over.
    groups: dict[int, Group] = field(default_factory=dict)
    # State of the groups that are over, by id; 0 for others.
    over: bytearray = field(default_factory=bytearray)
    # Number of training groups in each state.
    counts: list[int] = field(default_factory=lambda: [0] * (max(GroupState) + 1))
    waiting: Returned = field(default_factory=list)
    # Groups that came back and may be what ends workers (SUSPECT_FAILURES).
    suspects: Returned = field(default_factory=list)
    in_work: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    schedule: Schedule = field(default_factory=Schedule)
    deadlines: dict[GroupKey, float] = field(default_factory=dict)
    # Leased groups of each worker, by its name.
    leases_of: defaultdict[str, set[GroupKey]] = field(default_factory=lambda: defaultdict(set))
    # Fixed batches, by step. Forgotten ones keep their ids on disk only.
    batches: dict[int, list[int]] = field(default_factory=dict)
    # Groups of batches that a checkpoint covers.
    forgotten: int = 0
    # Groups in two committed batches, counted on the disk (loading.py).
    twice: int = 0
    # Groups whose record says that samples are stored, but whose samples are missing on the disk.
    missing: int = 0
    rounds: dict[int, Round] = field(default_factory=dict)
    results: dict[int, list[Result]] = field(default_factory=dict)
    # Bytes of all samples on the disk, and most of one group.
    stored: int = 0
    largest: int = 0
    images: ImageIndex = field(default_factory=ImageIndex)
    batch: WriteBatch = field(default_factory=WriteBatch)
    dirty: dict[GroupKey, Group] = field(default_factory=dict)
    # True if there are changes to write.
    changed: bool = False
    # Groups that the dynamic filter dropped since the last one that it kept.
    dropped: list[tuple[int, Group]] = field(default_factory=list)
    # Why no further batch can be put together; empty if one can. It is not on the disk: a new start
    # tries again.
    dead_end: str = ""
    watcher: GroupWatcher | None = None

    # -- queries

    def find(self, key: GroupKey) -> Group | None:
        """Return the record of a group that is not over."""
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
        """Groups that were leased once and have no state now. Any number but 0 is a bug."""
        return self.progress.next_group - sum(self.counts) + self.missing

    @property
    def trained(self) -> int:
        """Groups in committed batches that no rewind has undone."""
        return self.forgotten + sum(
            len(ids) for step, ids in self.batches.items() if step <= self.progress.step
        )

    @property
    def stored_groups(self) -> int:
        """Groups whose samples wait to be trained: in no batch yet, or in one not committed."""
        ahead = sum(len(ids) for step, ids in self.batches.items() if step > self.progress.step)
        return len(self.finished) + ahead

    @property
    def stored_bytes(self) -> int:
        """Bytes of all samples and images on the disk."""
        return self.stored + self.images.stored

    @property
    def largest_group(self) -> int:
        """Most bytes on the disk that one group has taken so far, with its images."""
        return self.largest + self.images.largest

    # -- changes

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
        if state.over:
            self.forget_images(key)

    def forget_images(self, key: GroupKey) -> None:
        """Delete the images that no group but this one refers to."""
        self.images.forget(self.batch, key)
        self.changed = True

    def lease_to(
        self, key: GroupKey, group: Group, worker: str, worker_attempt: int, deadline: float
    ) -> None:
        """Note the worker that a group is leased to, and the deadline."""
        group.worker, group.worker_attempt = worker, worker_attempt
        self.deadlines[key] = deadline
        self.leases_of[worker].add(key)

    def unlease(self, key: GroupKey, group: Group) -> None:
        """Forget the worker that a group is leased to."""
        self.deadlines.pop(key, None)
        self.leases_of[group.worker].discard(key)

    def queue(self, key: GroupKey, group: Group) -> None:
        """Put a group that came back into the queue for the next worker."""
        queues = self if key.round == TRAINING else self.rounds[key.round]
        heap = queues.suspects if is_suspect(group) else queues.waiting
        heapq.heappush(heap, (urgency(group), key.group_id))

    def start(self, key: GroupKey, version: int) -> Group:
        """Make the record of a group that is leased for the first time.

        `version` is the weight version of its worker.
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
        """Count a training group and put it into the indexes of its state."""
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
        """Store a group's samples in pieces.

        The caller must `discard` what was stored for the group before.
        """
        for position, piece in enumerate(pieces(value)):
            self.batch.put(table, _piece_key(key, position), piece)
        group.size = len(value)
        self.stored += footprint(group.size)
        self.largest = max(self.largest, footprint(group.size))
        self.changed = True

    def discard(self, table: str, key: GroupKey, group: Group) -> None:
        """Delete the samples that were stored for a group, if any."""
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
        """Return all changes since the last flush."""
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
    """True if the group may be what ends workers."""
    return group.failures >= SUSPECT_FAILURES


def urgency(group: Group) -> int:
    """Return the rank of a group among those that came back; the lowest is first."""
    return _NO_WEIGHTS if fresh(group) else group.version


def _piece_key(key: GroupKey, position: int) -> bytes:
    return value_key(key) + position.to_bytes(4, "big")


def pack_ids(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


def unpack_ids(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 8}q", data))
