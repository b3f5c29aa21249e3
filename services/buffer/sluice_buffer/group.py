"""A prompt group in the buffer's memory, and its record on the disk.

Every group that was ever leased has exactly one record, so its state has one answer, on disk and in
memory. The record is packed by hand: a trained group takes 40 bytes for the rest of the job's life.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NamedTuple

# The `round` of a training group's key. Evaluation groups carry the version that they evaluate.
TRAINING = -1


class GroupKey(NamedTuple):
    """Identifies a group.

    It is (TRAINING, position in the prompt stream) or (evaluated version, position in the round).
    """

    round: int
    group_id: int


class GroupState(enum.IntEnum):
    """The state of a group that was leased at least once.

    The numbers are on disk: never change one.
    """

    # A worker has the group.
    LEASED = 1
    # It came back unfinished, and goes to the next worker that asks.
    WAITING = 2
    # Its samples are stored, and no batch has it yet.
    FINISHED = 3
    # It belongs to the fixed batch of `step`, and is trained once that step is committed.
    BATCHED = 4
    # It is trained and covered by a checkpoint: its samples are deleted, its record stays.
    TRAINED = 5
    FILTERED = 6
    FAILED = 7

    @property
    def in_work(self) -> bool:
        return self <= GroupState.WAITING

    @property
    def over(self) -> bool:
        """True if only the state itself is stored of the group."""
        return self >= GroupState.TRAINED


_HEAD = struct.Struct("<BHIqqQHH")


@dataclass(slots=True)
class Group:
    """The record of a group.

    `version` is the oldest weights that any of its tokens may come from.
    """

    state: GroupState
    lease_attempt: int = 0
    failures: int = 0
    version: int = 0
    step: int = 0
    size: int = 0
    worker: str = ""
    worker_attempt: int = 0
    # Why the group was filtered or failed; if it came back, the number of tokens that it has; of a
    # finished evaluation group its votes (`rules/voting`).
    note: str = ""
    # Packed `SampleFacts`, one for each sample.
    summary: bytes = b""

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
    """Facts of a sample that batches, advantages and evaluation metrics need, without its tokens.

    Lengths are in tokens.
    """

    # All sequences with their prompts: the cost of training.
    length: int
    # Without branches.
    response_length: int
    trainable_tokens: int
    # A number of pb.SampleStatus.
    status: int
    reward: float
    min_version: int
    max_version: int
    # Tokens that images add, of all sequences; they are among `length`.
    image_tokens: int = 0


# The upper 24 bits of the status have the tokens of images. Databases from before have zeros there.
_FACTS = struct.Struct("<iiiIdqq")
_STATUS_BITS = 8
_MOST_IMAGE_TOKENS = (1 << 24) - 1


def pack_fact(
    length: int,
    response_length: int,
    trainable_tokens: int,
    status: int,
    reward: float,
    min_version: int,
    max_version: int,
    image_tokens: int = 0,
) -> bytes:
    """Pack SampleFacts, whose values are given in their order."""
    status |= min(image_tokens, _MOST_IMAGE_TOKENS) << _STATUS_BITS
    versions = min_version, max_version
    return _FACTS.pack(length, response_length, trainable_tokens, status, reward, *versions)


def pack_facts(facts: list[SampleFacts]) -> bytes:
    return b"".join([pack_fact(*fact) for fact in facts])


def unpack_facts(data: bytes) -> list[SampleFacts]:
    return [_unpacked(*values) for values in _FACTS.iter_unpack(data)]


def _unpacked(
    length: int, response: int, trainable: int, packed: int, reward: float, oldest: int, newest: int
) -> SampleFacts:
    status, image_tokens = packed & ((1 << _STATUS_BITS) - 1), packed >> _STATUS_BITS
    return SampleFacts(length, response, trainable, status, reward, oldest, newest, image_tokens)


def group_name(key: GroupKey, serial: int) -> str:
    """Return a name that is unique over the job's life.

    An evaluation round that is opened again gets a new serial number.
    """
    if key.round == TRAINING:
        return f"t{key.group_id}"
    return f"e{key.round}.{serial}.{key.group_id}"


def lease_id(key: GroupKey, serial: int, attempt: int) -> str:
    """Return the id of a lease: the group's name and the number of the lease."""
    return f"{group_name(key, serial)}.{attempt}"


class LeaseName(NamedTuple):
    key: GroupKey
    serial: int
    attempt: int


def parse_lease_id(text: str) -> LeaseName | None:
    """Return the group behind a lease id; None if the id is not valid."""
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
