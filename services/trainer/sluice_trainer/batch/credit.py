"""Units of credit: the parts of a batch that have separate rewards and advantages.

A unit is a sample; if the job has seats (`rollout.seats`), a seat of a sample; and with
`algorithm.turnAdvantage` a turn of the model in that. Rewards are compared within a group of
corresponding units: a seat with the same seat in the other samples of the prompt, a turn with the
turns at the same position there.
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

# (group id, index in the group)
SampleKey = tuple[int, int]
# (group id, index in the group, seat)
UnitKey = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class CreditUnit:
    """A sample, or a seat of a sample.

    Attributes
    ----------
    group, index, seat
        Group of the sample, its index in the group, and the seat.
    reward
        Reward of the unit.
    trained_tokens
        Tokens that are trained.
    response_length
        Tokens of the longest branch.
    turns
        Rewards of the turns, which are part of `reward`.

    """

    group: int
    index: int
    reward: float
    trained_tokens: int
    response_length: int
    seat: str = ""
    turns: tuple[float, ...] = ()

    @property
    def key(self) -> UnitKey:
        return self.group, self.index, self.seat


def units_of_batch(sequences: Sequence[pb.Sequence]) -> list[CreditUnit]:
    """Return a unit for each sample of a batch, from the metadata of the batch."""
    return [
        CreditUnit(s.group_id, s.index, s.reward, s.trainable_tokens, s.response_length)
        for s in sequences
    ]


def units_of_samples(
    sequences: Sequence[pb.Sequence], samples: Mapping[SampleKey, Sample], ranks: Ranks
) -> list[CreditUnit]:
    """Return the units of a batch with seats or turn advantages. Collective.

    Parameters
    ----------
    sequences
        Metadata of the samples of all ranks.
    samples
        Samples of this rank.
    ranks
        All ranks.

    Returns
    -------
    Units in batch order, those of a sample in the order of their seats' names.

    """
    local = {key: units_of_sample(key, sample) for key, sample in samples.items()}
    units = {key: units for part in ranks.gather(local) for key, units in part.items()}
    return [unit for s in sequences for unit in units[s.group_id, s.index]]


def units_of_sample(key: SampleKey, sample: Sample) -> list[CreditUnit]:
    """Return the units of one sample."""
    turns = turn_rewards(sample)
    units = []
    for seat in sorted({sequence.seat for sequence in sample.sequences}):
        sequences = [sequence for sequence in sample.sequences if sequence.seat == seat]
        reward = sample.seat_rewards.get(seat, sample.reward or 0.0)
        trained = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        # The first sequence is the longest branch.
        longest = sequences[0].response_length
        units.append(CreditUnit(*key, reward, trained, longest, seat, tuple(turns[seat])))
    return units


def groups_of(units: Sequence[CreditUnit]) -> list[int]:
    """Return the group in which each unit is compared.

    It is the prompt's group. With seats it is the pair of prompt and seat, numbered in the order of
    the first units.
    """
    if not any(unit.seat for unit in units):
        return [unit.group for unit in units]
    numbers: dict[tuple[int, str], int] = {}
    return [numbers.setdefault((unit.group, unit.seat), len(numbers)) for unit in units]


@dataclass(frozen=True, slots=True)
class TurnReturns:
    """Returns of all turns of a batch.

    Attributes
    ----------
    rewards
        [turns] float32.
    groups
        [turns] int, the group in which each turn is compared.
    first_turns
        [units], index of each unit's first turn.

    """

    rewards: Tensor
    groups: Tensor
    first_turns: list[int]


def turn_returns(
    units: Sequence[CreditUnit], rewards: Sequence[float], gamma: float
) -> TurnReturns:
    """Compute returns of turns, R_t = r_t + gamma * R_{t+1}.

    GTPO (Ding et al. 2025, arXiv:2511.14846), where they are normalized in a group and used as
    advantages. r_t is the reward of the turn; to that of the last turn comes the part of the unit's
    reward that is not of a turn. Turns are compared with those at the same position, counted from
    the first turn of the unit.

    Parameters
    ----------
    units
        Units of the batch.
    rewards
        [units], rewards after penalties.
    gamma
        Discount from turn to turn.

    """
    values: list[float] = []
    positions: list[tuple[int, int]] = []
    first_turns: list[int] = []
    for unit, group, reward in zip(units, groups_of(units), rewards, strict=True):
        first_turns.append(len(values))
        # The part of the reward that is not of a turn is earned at the last turn.
        returns, following = [], reward - sum(unit.turns)
        for position, turn_reward in enumerate(reversed(unit.turns)):
            following = turn_reward + (following if position == 0 else gamma * following)
            returns.append(following)
        values += reversed(returns)
        positions += [(group, position) for position in range(len(unit.turns))]
    numbers: dict[tuple[int, int], int] = {}
    groups = [numbers.setdefault(position, len(numbers)) for position in positions]
    return TurnReturns(torch.tensor(values, dtype=torch.float32), torch.tensor(groups), first_turns)


def turn_positions(sample: Sample) -> list[Tensor]:
    """Return the position of each response token's turn among the turns of its seat.

    Returns
    -------
    For each sequence of the sample [response] int64; 0 at tokens that the model did not sample.

    """
    spans = spans_of(sample)
    turn_numbers: dict[str, set[int]] = {}
    for sequence, sequence_spans in zip(sample.sequences, spans, strict=True):
        numbers = turn_numbers.setdefault(sequence.seat, set())
        numbers.update(span.number for span in sequence_spans)
    position = {
        seat: {number: place for place, number in enumerate(sorted(numbers))}
        for seat, numbers in turn_numbers.items()
    }
    positions = []
    for sequence, sequence_spans in zip(sample.sequences, spans, strict=True):
        row = torch.zeros(sequence.response_length, dtype=torch.int64)
        for span in sequence_spans:
            row[span.start : span.end] = position[sequence.seat][span.number]
        positions.append(row)
    return positions


def turn_indices(
    sequences: Sequence[TrainSequence],
    samples: Mapping[SampleKey, Sample],
    first_turns: Mapping[UnitKey, int],
) -> list[Tensor]:
    """Return the index into `TurnReturns` of each token's turn.

    Parameters
    ----------
    sequences
        Sequences of this rank.
    samples
        Samples of this rank.
    first_turns
        Index of each unit's first turn.

    Returns
    -------
    Each [response] int64.

    """
    positions = {key: turn_positions(sample) for key, sample in samples.items()}
    return [
        positions[s.group_id, s.index][s.branch] + first_turns[s.group_id, s.index, s.seat]
        for s in sequences
    ]


def metrics(units: Sequence[CreditUnit]) -> dict[str, float]:
    """Return each seat's mean reward, and the share of groups whose rewards are all equal.

    Empty without seats.
    """
    by_seat: dict[str, list[float]] = {}
    by_group: dict[int, list[float]] = {}
    for unit, group in zip(units, groups_of(units), strict=True):
        by_seat.setdefault(unit.seat, []).append(unit.reward)
        by_group.setdefault(group, []).append(unit.reward)
    if not any(by_seat):
        return {}
    equal = [max(rewards) - min(rewards) < 1e-6 for rewards in by_group.values()]
    means = {
        f"multi_turn/seat/{seat}/reward": fmean(rewards)
        for seat, rewards in by_seat.items()
        if seat
    }
    return means | {"rollout/zero_std/ratio": sum(equal) / len(equal)}
