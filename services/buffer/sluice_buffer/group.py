"""One prompt group in the buffer's memory, and its form on the disk.

Every group that was ever leased has exactly one record, so that "which state is group 17 in" has
one answer, on disk and in memory. The record is packed by hand: at 40 bytes a trained group costs
next to nothing for the job's life.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NamedTuple

TRAINING = -1
"""The `round` of a training group's key; evaluation groups carry the version that they evaluate."""


class GroupKey(NamedTuple):
    """Names a group: (TRAINING, position in the prompt stream) or (evaluated version, position in
    the round).
    """

    round: int
    group_id: int


class GroupState(enum.IntEnum):
    """The one state of a group that was leased at least once.

    The numbers are on disk: never change one.
    """

    LEASED = 1
    """A worker has it."""
    WAITING = 2
    """It came back unfinished and goes to the next worker that asks."""
    FINISHED = 3
    """Its samples are stored; no batch has it yet."""
    BATCHED = 4
    """It belongs to the fixed batch of `step`; trained as soon as that step is committed."""
    TRAINED = 5
    """Trained and covered by a checkpoint: the samples are forgotten, the fact is not."""
    FILTERED = 6
    FAILED = 7

    @property
    def in_work(self) -> bool:
        return self <= GroupState.WAITING

    @property
    def over(self) -> bool:
        """True where nothing is stored for the group any more but the fact itself."""
        return self >= GroupState.TRAINED


_HEAD = struct.Struct("<BHIqqQHH")


@dataclass(slots=True)
class Group:
    """One group's record. `version`: the oldest weights that any of its tokens may come from."""

    state: GroupState
    lease_attempt: int = 0
    failures: int = 0
    version: int = 0
    step: int = 0
    size: int = 0
    worker: str = ""
    worker_attempt: int = 0
    note: str = ""
    """Why it was filtered or failed; tokens that it had generated when it came back; of a finished
    evaluation group its votes (`rules/voting`)."""
    summary: bytes = b""
    """Packed `SampleFacts`, one for each sample."""

    def pack(self) -> bytes:
        worker = f"{self.worker}/{self.worker_attempt}".encode() if self.worker else b""
        note = self.note.encode()[:1024]
        head = _HEAD.pack(
            self.state,
            self.failures,
            self.lease_attempt,
            self.version,
            self.step,
            self.size,
            len(worker),
            len(note),
        )
        return b"".join((head, worker, note, self.summary))

    @classmethod
    def unpack(cls, data: bytes) -> Group:
        state, failures, attempt, version, step, size, worker_size, note_size = _HEAD.unpack_from(
            data
        )
        at = _HEAD.size
        name, _, worker_attempt = data[at : at + worker_size].decode().rpartition("/")
        at += worker_size
        return cls(
            state=GroupState(state),
            lease_attempt=attempt,
            failures=failures,
            version=version,
            step=step,
            size=size,
            worker=name,
            worker_attempt=int(worker_attempt or 0),
            note=data[at : at + note_size].decode(errors="ignore"),
            summary=data[at + note_size :],
        )


class SampleFacts(NamedTuple):
    """The facts of a sample that batches, advantages and evaluation metrics need, without its
    tokens. Lengths are in tokens.
    """

    length: int
    """Of all its sequences, prompts too: what it costs to train."""
    response_length: int
    """Without its branches."""
    trainable_tokens: int
    status: int
    """A number of pb.SampleStatus."""
    reward: float
    min_version: int
    max_version: int


_FACTS = struct.Struct("<iiiidqq")


pack_fact = _FACTS.pack
"""SampleFacts, given one by one in their order, as bytes."""


def pack_facts(facts: list[SampleFacts]) -> bytes:
    return b"".join([_FACTS.pack(*one) for one in facts])


def unpack_facts(data: bytes) -> list[SampleFacts]:
    return [SampleFacts(*one) for one in _FACTS.iter_unpack(data)]


def group_name(key: GroupKey, serial: int) -> str:
    """Unique over the job's life: an evaluation round that is opened again
    gets a new serial number.
    """
    if key.round == TRAINING:
        return f"t{key.group_id}"
    return f"e{key.round}.{serial}.{key.group_id}"


def lease_id(key: GroupKey, serial: int, attempt: int) -> str:
    """The group's name and the number of the lease."""
    return f"{group_name(key, serial)}.{attempt}"


class LeaseName(NamedTuple):
    key: GroupKey
    serial: int
    attempt: int


def parse_lease_id(text: str) -> LeaseName | None:
    """The group behind a lease id; None where the id is not one of ours."""
    kind, numbers = text[:1], text[1:].split(".")
    digits = "".join(numbers)
    if not (digits.isascii() and digits.isdigit() and all(numbers) and max(map(len, numbers)) < 19):
        return None
    match kind, [int(n) for n in numbers]:
        case "t", [group_id, attempt]:
            return LeaseName(GroupKey(TRAINING, group_id), 0, attempt)
        case "e", [version, serial, group_id, attempt]:
            return LeaseName(GroupKey(version, group_id), serial, attempt)
    return None
