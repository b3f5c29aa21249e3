"""Parts of a batch that have an advantage of their own: a sample; where the job has seats
(`rollout.seats`) a seat of one; and with `algorithm.turnAdvantage` a turn of the model in that.

Rewards are compared within a group of equal parts: a seat with the same seat of the other samples
of the prompt, a turn with the turns of the same place in those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from sluice.samples.sample import Sample
from sluice.samples.turns import spans_of, turn_rewards
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.distributed.ranks import Ranks

SampleKey = tuple[int, int]
"""(group id, index in the group)"""
UnitKey = tuple[int, int, str]
"""(group id, index in the group, seat)"""


@dataclass(frozen=True, slots=True)
class Unit:
    """A sample, or a seat of one. trained: tokens that are trained. response_length: of its longest
    branch. turns: rewards of its turns, which are a part of `reward`.
    """

    group: int
    index: int
    reward: float
    trained: int
    response_length: int
    seat: str = ""
    turns: tuple[float, ...] = ()

    @property
    def key(self) -> UnitKey:
        return self.group, self.index, self.seat


def of_batch(sound: Sequence[pb.Sequence]) -> list[Unit]:
    """A unit for each sample of a batch, from the batch's metadata."""
    return [
        Unit(s.group_id, s.index, s.reward, s.trainable_tokens, s.response_length) for s in sound
    ]


def of_samples(
    sound: Sequence[pb.Sequence], samples: Mapping[SampleKey, Sample], ranks: Ranks
) -> list[Unit]:
    """The units of a whole batch where samples have seats, or turns count; in batch order, and then
    in the order of the seats' names. samples: of this rank. Collective.
    """
    of_rank = {key: units_of(key, sample) for key, sample in samples.items()}
    known = {key: units for part in ranks.gather(of_rank) for key, units in part.items()}
    return [unit for s in sound for unit in known[s.group_id, s.index]]


def units_of(key: SampleKey, sample: Sample) -> list[Unit]:
    """The units of one sample."""
    turns = turn_rewards(sample)
    units = []
    for seat in sorted({sequence.seat for sequence in sample.sequences}):
        sequences = [sequence for sequence in sample.sequences if sequence.seat == seat]
        reward = sample.seat_rewards.get(seat, sample.reward or 0.0)
        trained = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        longest = sequences[0].response_length
        units.append(Unit(*key, reward, trained, longest, seat, tuple(turns[seat])))
    return units


def groups_of(units: Sequence[Unit]) -> list[int]:
    """The group in which each unit is compared: a prompt's, and where there are seats the seat's of
    the prompt, numbered in the order of their first units.
    """
    if not any(unit.seat for unit in units):
        return [unit.group for unit in units]
    numbers: dict[tuple[int, str], int] = {}
    return [numbers.setdefault((unit.group, unit.seat), len(numbers)) for unit in units]


@dataclass(frozen=True, slots=True)
class TurnReturns:
    """Returns of all turns of a batch. rewards [turns] float32, groups [turns] int: as of units.
    first: [units] the place of each one's first turn.
    """

    rewards: Tensor
    groups: Tensor
    first: list[int]


def turn_returns(units: Sequence[Unit], rewards: Sequence[float], gamma: float) -> TurnReturns:
    """Returns of turns, R_t = r_t + gamma * R_{t+1} (GTPO, Ding et al. 2025, arXiv:2511.14846: they
    are normalized in a group, and are the advantages).

    r_t is the reward that the turn was given; to that of the last turn comes what the unit's reward
    (rewards: [units]) has beside those of its turns. Turns are compared with those of the same
    place, counted from the unit's first one.
    """
    values: list[float] = []
    places: list[tuple[int, int]] = []
    first: list[int] = []
    for unit, group, reward in zip(units, groups_of(units), rewards, strict=True):
        first.append(len(values))
        of_unit, following = [], reward - sum(unit.turns)
        for place, own in enumerate(reversed(unit.turns)):
            following = own + (following if place == 0 else gamma * following)
            of_unit.append(following)
        values += reversed(of_unit)
        places += [(group, place) for place in range(len(unit.turns))]
    numbers: dict[tuple[int, int], int] = {}
    groups = [numbers.setdefault(place, len(numbers)) for place in places]
    return TurnReturns(torch.tensor(values, dtype=torch.float32), torch.tensor(groups), first)


def turn_places(sample: Sample) -> list[Tensor]:
    """The place of each response token's turn among those of its seat, of each of a sample's
    sequences: [response] int64; 0 at tokens that the model has not sampled.
    """
    spans = spans_of(sample)
    order: dict[str, set[int]] = {}
    for sequence, of_sequence in zip(sample.sequences, spans, strict=True):
        order.setdefault(sequence.seat, set()).update(one.number for one in of_sequence)
    rank = {
        seat: {number: place for place, number in enumerate(sorted(numbers))}
        for seat, numbers in order.items()
    }
    places = []
    for sequence, of_sequence in zip(sample.sequences, spans, strict=True):
        row = torch.zeros(sequence.response_length, dtype=torch.int64)
        for one in of_sequence:
            row[one.start : one.end] = rank[sequence.seat][one.number]
        places.append(row)
    return places


def own_places(
    sequences: Sequence[TrainSequence],
    samples: Mapping[SampleKey, Sample],
    first: Mapping[UnitKey, int],
) -> list[Tensor]:
    """The place of each token's turn in `TurnReturns`, of this rank's sequences: each [response].
    first: place of a unit's first turn.
    """
    places = {key: turn_places(sample) for key, sample in samples.items()}
    return [
        places[s.group_id, s.index][s.branch] + first[s.group_id, s.index, s.seat]
        for s in sequences
    ]


def metrics(units: Sequence[Unit]) -> dict[str, float]:
    """Of each seat its mean reward; and the share of prompts, and seats of them, whose rewards are
    all equal. Nothing where there are no seats.
    """
    by_seat: dict[str, list[float]] = {}
    by_group: dict[int, list[float]] = {}
    for unit, group in zip(units, groups_of(units), strict=True):
        by_seat.setdefault(unit.seat, []).append(unit.reward)
        by_group.setdefault(group, []).append(unit.reward)
    if not any(by_seat):
        return {}
    equal = [max(rewards) - min(rewards) < 1e-6 for rewards in by_group.values()]
    means = {f"multi_turn/seat/{seat}/reward": fmean(of) for seat, of in by_seat.items() if seat}
    return means | {"rollout/zero_std/ratio": sum(equal) / len(equal)}
