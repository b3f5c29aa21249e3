"""Units of credit: seats and turns with separate advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sluice.api import Algorithm
from sluice.samples.sample import Sample, SampleStatus, TokenSequence, WeightSpan
from sluice.samples.turns import BRANCH_TURNS, TURNS, turn_rewards
from sluice_trainer.algorithms.estimators import Responses, estimate
from sluice_trainer.batch import credit
from sluice_trainer.batch.credit import CreditUnit
from sluice_trainer.batch.estimator_inputs import by_turn, unit_key
from sluice_trainer.batch.sequences import TrainSequence


def turn(length: int, number: int, reward: float = 0.0) -> dict[str, Any]:
    record = {"by": "model", "length": length, "finish": "stop", "turn": number}
    return record | ({"reward": reward} if reward else {})


def observation(length: int) -> dict[str, Any]:
    return {"by": "environment", "length": length, "finish": "stop"}


def fill(sequence: TokenSequence, records: list[dict[str, Any]], seat: str = "") -> None:
    """Append one prompt token and the tokens of these turns."""
    sequence.tokens, sequence.seat = np.array([9], np.int32), seat
    for record in records:
        n = record["length"]
        span = [WeightSpan(0, 0, n)]
        sequence.append([1] * n, [-1.0] * n, span, trainable=record["by"] == "model")


def game(index: int, white: float, black: float) -> Sample:
    """White speaks twice, black once: 2 + 2 and 3 tokens."""
    own, other = [turn(2, 0), observation(1), turn(2, 1)], [turn(3, 2)]
    sample = Sample(index, reward=0.0, status=SampleStatus.COMPLETED)
    sample.branches = [TokenSequence()]
    sample.metadata = {TURNS: own, BRANCH_TURNS: [other]}
    sample.seat_rewards = {"white": white, "black": black}
    fill(sample, own, "white")
    fill(sample.branches[0], other, "black")
    sample.check()
    return sample


def units_of(samples: list[Sample], group: int = 5) -> list[CreditUnit]:
    return [unit for s in samples for unit in credit.units_of_sample((group, s.index), s)]


def rows(samples: list[Sample], units: list[CreditUnit], **algorithm: Any) -> list[list[float]]:
    """The advantages of these samples' sequences, as a rank prepares them."""
    chosen = Algorithm.model_validate({"normalizeStd": False, **algorithm})
    sequences = [sequence for s in samples for sequence in TrainSequence.from_sample(5, s, 0.0)]
    place = {unit.key: i for i, unit in enumerate(units)}
    masks = [torch.tensor(s.loss_mask) for s in sequences]
    responses = Responses(
        rewards=torch.tensor([unit.reward for unit in units]),
        groups=torch.tensor(credit.groups_of(units)),
        own=torch.tensor([place[unit_key(s)] for s in sequences]),
        masks=masks,
        kl=[torch.zeros(len(mask)) for mask in masks],
        lengths=torch.tensor([unit.trained_tokens for unit in units]),
    )
    if chosen.turn_advantage:
        by_key = {(5, s.index): s for s in samples}
        gamma = chosen.turn_advantage.gamma
        responses = by_turn(responses, units, sequences, by_key, gamma)
    return [row.tolist() for row in estimate(responses, chosen).advantages]


def test_a_sample_without_seats_is_one_unit_in_the_group_of_its_prompt() -> None:
    sample = Sample(3, reward=0.5, status=SampleStatus.COMPLETED)
    fill(sample, [turn(2, 0)])
    assert units_of([sample], group=8) == [CreditUnit(8, 3, 0.5, 2, 2, "", (0.0,))]
    assert credit.groups_of(units_of([sample], group=8)) == [8]


def test_a_seat_is_a_unit_with_the_tokens_that_it_sampled() -> None:
    black, white = units_of([game(0, 1.0, -1.0)])
    assert (white.seat, white.reward, white.trained_tokens, white.response_length) == (
        "white",
        1,
        4,
        5,
    )
    assert (black.seat, black.reward, black.trained_tokens, black.response_length) == (
        "black",
        -1,
        3,
        3,
    )


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo"])
def test_the_reward_of_one_seat_does_not_change_the_other(estimator: str) -> None:
    """White always wins and black always loses, so neither has an advantage.

    With one baseline for both seats, white would be rewarded and black punished.
    """
    samples = [game(i, 1.0, -1.0) for i in range(3)]
    assert rows(samples, units_of(samples), estimator=estimator) == [[0] * 5, [0] * 3] * 3


def test_each_seat_is_compared_with_the_same_seat_in_other_episodes() -> None:
    samples = [game(0, 1.0, -1.0), game(1, 0.0, -1.0), game(2, 0.5, 2.0)]
    assert rows(samples, units_of(samples)) == [
        [0.5] * 5, [-1] * 3, [-0.5] * 5, [-1] * 3, [0] * 5, [2] * 3,
    ]  # fmt: skip


def test_seats_of_different_prompts_are_different_groups() -> None:
    units = [*units_of([game(0, 1.0, 0.0)], group=5), *units_of([game(0, 1.0, 0.0)], group=6)]
    assert credit.groups_of(units) == [0, 1, 2, 3]


def test_metrics_treat_each_seat_separately() -> None:
    """A game of zero sum: as episodes all are worth 0, and yet white's differ."""
    units = units_of([game(0, 1.0, -1.0), game(1, 0.0, -1.0)])
    assert credit.metrics(units) == {
        "multi_turn/seat/white/reward": 0.5,
        "multi_turn/seat/black/reward": -1.0,
        "rollout/zero_std/ratio": 0.5,
    }
    assert credit.metrics(credit.units_of_batch([])) == {}


@pytest.mark.parametrize(
    ("turns", "reward", "gamma", "returns"),
    [
        pytest.param((0.0, 0.0), 1.0, 1.0, [1, 1], id="an outcome alone is the return of all"),
        pytest.param((0.0, 0.0), 1.0, 0.5, [0.5, 1], id="an outcome, discounted"),
        pytest.param((0.25, 0.5), 0.75, 1.0, [0.75, 0.5], id="rewards of turns alone"),
        pytest.param((0.25, 0.5), 1.75, 0.5, [0.25 + 0.5 * 1.5, 1.5], id="both"),
        pytest.param((0.25,), 0.25, 0.5, [0.25], id="one turn"),
    ],
)
def test_the_return_of_a_turn_is_the_discounted_sum_of_later_rewards(
    turns: tuple[float, ...], reward: float, gamma: float, returns: list[float]
) -> None:
    unit = CreditUnit(5, 0, reward, 1, 1, turns=turns)
    assert credit.turn_returns([unit], [reward], gamma).rewards.tolist() == returns


def played(index: int, *rewards: float, outcome: float = 0.0) -> Sample:
    """An episode of turns of 1, 2, 3, ... tokens with something told between them."""
    records: list[dict[str, Any]] = []
    for number, reward in enumerate(rewards):
        records += [observation(1)] if number else []
        records.append(turn(number + 1, number, reward))
    sample = Sample(index, reward=outcome + sum(rewards), status=SampleStatus.COMPLETED)
    sample.metadata = {TURNS: records}
    fill(sample, records)
    return sample


def test_turns_are_compared_with_turns_at_the_same_position() -> None:
    """The returns are 1.5 and 1; 0 and 0; 1, 1 and 1.

    A position that only one episode has reached has no advantage. Values between turns are masked.
    """
    samples = [played(0, 0.5, 1.0), played(1, 0.0, 0.0), played(2, 0.0, 0.0, 1.0)]
    first, second, third = rows(samples, units_of(samples), turnAdvantage={})
    mean, later = (1.5 + 0 + 1) / 3, (1 + 0 + 1) / 3
    assert [first[i] for i in (0, 2, 3)] == pytest.approx([1.5 - mean, 1 - later, 1 - later])
    assert [second[i] for i in (0, 2, 3)] == pytest.approx([-mean, -later, -later])
    assert [third[i] for i in (0, 2, 5)] == pytest.approx([1 - mean, 1 - later, 0])


def test_without_turn_rewards_all_turns_have_the_advantage_of_the_episode() -> None:
    samples = [played(0, 0.0, 0.0, outcome=1.0), played(1, 0.0, 0.0)]
    by_turns = rows(samples, units_of(samples), turnAdvantage={})
    assert [[row[i] for i in (0, 2, 3)] for row in by_turns] == [[0.5] * 3, [-0.5] * 3]
    assert rows(samples, units_of(samples)) == [[0.5] * 4, [-0.5] * 4]


def test_a_turn_that_branches_share_is_one_turn() -> None:
    """Turn 0 is in both branches, and turns 1 and 2 are in one branch each."""
    own, other = (
        [turn(1, 0), observation(1), turn(2, 2)],
        [turn(1, 0), observation(1), turn(1, 1, 0.5)],
    )
    sample = Sample(0, reward=1.5, status=SampleStatus.COMPLETED, branches=[TokenSequence()])
    sample.metadata = {TURNS: own, BRANCH_TURNS: [other]}
    fill(sample, own)
    fill(sample.branches[0], other)
    assert units_of([sample])[0].turns == (0.0, 0.5, 0.0)
    assert [row.tolist() for row in credit.turn_positions(sample)] == [[0, 0, 2, 2], [0, 0, 1]]


def test_turns_are_counted_per_seat() -> None:
    samples = [game(0, 1.0, 0.0), game(1, 0.0, 0.0)]
    white, black = rows(samples, units_of(samples), turnAdvantage={})[:2]
    assert ([white[i] for i in (0, 1, 3, 4)], black) == ([0.5] * 4, [0] * 3)


def test_a_plain_answer_is_one_turn() -> None:
    sample = Sample(0, reward=1.0, status=SampleStatus.COMPLETED)
    fill(sample, [turn(2, 0)])
    assert [row.tolist() for row in credit.turn_positions(sample)] == [[0, 0]]


def test_a_failed_sample_has_only_the_turns_of_its_tokens() -> None:
    sample = game(0, 1.0, -1.0)
    sample.fail("the reward raised")
    assert (sample.seat_rewards, sample.branches) == ({}, [])
    assert turn_rewards(sample) == {"white": [0, 0]}
