"""Turns of a sample: their keys in its metadata, and the tokens that they cover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.input_checks import InputError, reward, shown
from sluice.samples.sample import Sample

# [{"by": "model" | "environment", "length": tokens, "finish": ..., "stop": ...}, ...]; and a list
# of such lists, one for each of the sample's branches. Turns of a tree have a number, `turn`, which
# is the same in all branches that share one. A rewarded turn has its `reward`.
TURNS, BRANCH_TURNS = "turns", "branch_turns"
MODEL, ENVIRONMENT = "model", "environment"
# Keys of a turn's record: the number of images that it shows, or that came between the turn before
# and this one, and the tokens that they add.
IMAGES, IMAGE_TOKENS = "images", "image_tokens"
# Key of a sample's metadata: the limit of time at which its episode was cut off, in words.
TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """A turn of the model: response tokens [start, end) of one sequence of its sample.

    `number` is the same in all sequences that share the turn, and grows in the order in which turns
    begin. `reward` is the reward of the turn alone.
    """

    number: int
    start: int
    end: int
    reward: float = 0.0


def check_turns(metadata: Mapping[str, Any], sequences: int, name: str) -> None:
    """Raise InputError unless the records of a sample's turns can be read.

    Parameters
    ----------
    metadata
        Metadata of the sample, which has passed `input_checks`.
    sequences
        Number of sequences of the sample: its own tokens and its branches.
    name
        Name of the metadata in the message.

    """
    if TURNS not in metadata and BRANCH_TURNS not in metadata:
        return
    of_branches = metadata.get(BRANCH_TURNS, [])
    if not isinstance(of_branches, list):
        raise InputError(f"{name}.{BRANCH_TURNS}: expected a list, found {shown(of_branches)}")
    of_sequences = records_of(metadata)
    if metadata.get(TURNS) and len(of_sequences) < sequences:
        raise InputError(f"{name}.{BRANCH_TURNS}: expected the turns of {sequences - 1} branches")
    for place, records in enumerate(of_sequences):
        where = f"{name}.{BRANCH_TURNS}[{place - 1}]" if place else f"{name}.{TURNS}"
        if not isinstance(records, list):
            raise InputError(f"{where}: expected a list of turns, found {shown(records)}")
        for position, record in enumerate(records):
            _check_record(record, f"{where}[{position}]")


def _check_record(record: Any, name: str) -> None:
    """Raise InputError unless `_spans` can read the record of a turn."""
    if not (isinstance(record, dict) and isinstance(record.get("by"), str)):
        raise InputError(f"{name}: expected an object with by and length, found {shown(record)}")
    for key in ("length", "turn"):
        number = record.get(key, 0 if key == "turn" else None)
        if type(number) is not int or not 0 <= number < 1 << 31:
            raise InputError(f"{name}.{key}: expected a number of tokens, found {shown(number)}")
    if "reward" in record:
        reward(record["reward"], f"{name}.reward")


def records_of(metadata: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the records of a sample's own tokens, and those of each branch."""
    return [metadata.get(TURNS, []), *metadata.get(BRANCH_TURNS, [])]


def spans_of(sample: Sample) -> list[list[TurnSpan]]:
    """Return the model's turns in each of a sample's sequences. A plain answer is one turn.

    A failed sample has lost its branches, but still has their records.
    """
    if not sample.metadata.get(TURNS):
        return [[TurnSpan(0, 0, sequence.response_length)] for sequence in sample.sequences]
    records = records_of(sample.metadata)[: len(sample.sequences)]
    return [list(_spans(of_sequence)) for of_sequence in records]


def turn_rewards(sample: Sample) -> dict[str, list[float]]:
    """Return the rewards of a sample's turns by seat, in the order in which turns begin.

    A turn without a reward counts as 0.
    """
    rewards: dict[str, dict[int, float]] = {}
    for sequence, spans in zip(sample.sequences, spans_of(sample), strict=True):
        rewards.setdefault(sequence.seat, {}).update({span.number: span.reward for span in spans})
    return {
        seat: [by_number[number] for number in sorted(by_number)]
        for seat, by_number in rewards.items()
    }


def _spans(records: Iterable[Mapping[str, Any]]) -> Iterator[TurnSpan]:
    at = place = 0
    for record in records:
        end = at + record["length"]
        if record["by"] == MODEL:
            number = record.get("turn", place)
            yield TurnSpan(number, at, end, float(record.get("reward", 0.0)))
            place += 1
        at = end
