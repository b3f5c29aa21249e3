"""Advantages of seats and turns by the formulas of docs/agents/seats.md, in numpy alone.

Episodes are trees of turns, as the gateway writes them: branches share turns, and each seat has a
tree. A turn's tokens have an id of their own, by which their advantage is found in any sequence.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from sluice.samples.sample import Sample, SampleStatus, WeightSpan
from sluice_rollout.gateway.conversation import Conversation, write_branches
from sluice_rollout.scoring import seat_rewards
from tests.unit.trainer.test_credit import rows, units_of


@dataclass
class Spoken:
    """A turn: the id of its tokens, their number, the turn that it follows, and its reward."""

    token: int
    length: int
    parent: int | None = None
    reward: float = 0.0


@dataclass
class Player:
    """A seat of an episode: its turns in the order in which they began, and its own reward."""

    turns: list[Spoken]
    outcome: float = 0.0


@dataclass
class Played:
    """An episode, by seat."""

    players: dict[str, Player] = field(default_factory=dict)


def sample_of(index: int, episode: Played) -> Sample:
    """Write the episode as the gateway and the worker do."""
    conversations = {}
    for seat, player in episode.players.items():
        conversation = Conversation()
        for spoken in player.turns:
            parent = None if spoken.parent is None else conversation.turns[spoken.parent]
            # What is told before a turn differs from turn to turn, so each begins anew.
            turn = conversation.turn_at(parent, [9000 + spoken.token])
            turn.tokens = np.full(spoken.length, spoken.token, np.int32)
            turn.log_probs = np.full(spoken.length, -1.0, np.float32)
            turn.spans = [WeightSpan(0, 0, spoken.length)]
            turn.finish, turn.reward = "stop", spoken.reward
        conversations[seat] = conversation
    sample = Sample(index, status=SampleStatus.COMPLETED)
    write_branches(conversations, sample)
    if list(episode.players) == [""]:
        sample.reward = episode.players[""].outcome
    else:
        sample.seat_rewards = {seat: p.outcome for seat, p in episode.players.items()}
    seat_rewards.settle(sample)
    sample.check()
    return sample


def baseline(estimator: str, own: float, group: list[float]) -> float:
    """The advantage of one value of a group, which contains it."""
    values = np.array(group)
    if estimator == "rloo":
        return own - (values.sum() - own) / (len(group) - 1) if len(group) > 1 else 0.0
    if estimator == "dr_grpo" or len(group) == 1:
        return float(own - values.mean())
    return float((own - values.mean()) / (values.std(ddof=1) + 1e-6))


def by_seat(episodes: list[Played], estimator: str) -> list[dict[int, float]]:
    """A(i, s) over G(s) = {r(j, s)}: r(i, s) is the seat's reward with those of its turns."""

    def reward(player: Player) -> float:
        return player.outcome + sum(turn.reward for turn in player.turns)

    advantages: list[dict[int, float]] = []
    for episode in episodes:
        advantages.append({})
        for seat, player in episode.players.items():
            group = [reward(other.players[seat]) for other in episodes]
            value = baseline(estimator, reward(player), group)
            advantages[-1] |= {turn.token: value for turn in player.turns}
    return advantages


def by_turn(episodes: list[Played], estimator: str, gamma: float) -> list[dict[int, float]]:
    """A(i, s, t) over G(s, t) = {R(j, s, t)} with R(t) = sum over k >= t of gamma^(k-t) r(k).

    r of the last turn has the outcome too.
    """

    def returns(player: Player) -> list[float]:
        earned = np.array([turn.reward for turn in player.turns])
        earned[-1] += player.outcome
        last = len(earned)
        return [
            sum(gamma ** (k - t) * float(earned[k]) for k in range(t, last)) for t in range(last)
        ]

    advantages: list[dict[int, float]] = []
    for episode in episodes:
        advantages.append({})
        for seat, player in episode.players.items():
            others = [returns(other.players[seat]) for other in episodes]
            for place, (turn, value) in enumerate(zip(player.turns, returns(player), strict=True)):
                group = [values[place] for values in others if len(values) > place]
                advantages[-1][turn.token] = baseline(estimator, value, group)
    return advantages


def check(episodes: list[Played], expected: list[dict[int, float]], **algorithm: Any) -> None:
    """Compare each trained token, and check that each sampled token is trained once."""
    samples = [sample_of(i, episode) for i, episode in enumerate(episodes)]
    found = iter(rows(samples, units_of(samples), **algorithm))
    for episode, sample, advantages in zip(episodes, samples, expected, strict=True):
        trained: Counter[int] = Counter()
        for sequence in sample.sequences:
            response = sequence.tokens[sequence.prompt_length :].tolist()
            for token, mask, value in zip(response, sequence.loss_mask, next(found), strict=True):
                if mask:
                    trained[token] += 1
                    assert value == pytest.approx(advantages[token], abs=1e-5)
        players = episode.players.values()
        assert trained == {turn.token: turn.length for p in players for turn in p.turns}


# White asks twice from its first turn (two branches), and black speaks twice in one line.
GAMES = [
    Played({
        "white": Player(
            [Spoken(10, 2), Spoken(11, 3, 0, 0.5), Spoken(12, 1, 0, -0.25)], outcome=1.0
        ),
        "black": Player([Spoken(13, 2, None, 0.125), Spoken(14, 4, 0)], outcome=-1.0),
    }),
    Played({
        "white": Player([Spoken(20, 1), Spoken(21, 2, 0, 1.0)], outcome=0.0),
        "black": Player([Spoken(23, 3), Spoken(24, 1, 0), Spoken(25, 2)], outcome=0.5),
    }),
    Played({
        "white": Player([Spoken(30, 4, None, 0.75)], outcome=-1.0),
        "black": Player([Spoken(33, 1), Spoken(34, 1, 0, 2.0)], outcome=1.0),
    }),
]  # fmt: skip
ESTIMATORS = ["grpo", "dr_grpo", "rloo"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_advantage_of_a_seat_is_that_of_the_formula(estimator: str) -> None:
    check(GAMES, by_seat(GAMES, estimator), estimator=estimator, normalizeStd=True)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_advantage_of_a_turn_is_that_of_the_formula(estimator: str, gamma: float) -> None:
    expected = by_turn(GAMES, estimator, gamma)
    check(
        GAMES, expected, estimator=estimator, normalizeStd=True, turnAdvantage={"gamma": gamma}
    )  # fmt: skip


def test_the_formula_by_hand_for_the_turns_of_white() -> None:
    """With gamma 0.5 the returns of white are 0.4375, 0.875, 0.75; 0.5, 1; and -0.25."""
    first, second, third = by_turn(GAMES, "dr_grpo", 0.5)
    mean = (0.4375 + 0.5 - 0.25) / 3
    assert [first[10], second[20], third[30]] == pytest.approx(
        [0.4375 - mean, 0.5 - mean, -0.25 - mean]
    )
    assert (first[11], second[21]) == pytest.approx((-0.0625, 0.0625))
    assert first[12] == 0.0, "no other game has a third turn of white"


def random_episode(random_: random.Random, seats: list[str], first: int) -> Played:
    episode, token = Played(), first
    for seat in seats:
        turns: list[Spoken] = []
        for _ in range(random_.randint(1, 5)):
            parent = random_.choice([None, *range(len(turns))])
            reward = random_.choice([0.0, 0.0, 0.5, -1.0])
            turns.append(Spoken(token, random_.randint(1, 4), parent, reward))
            token += 1
        episode.players[seat] = Player(turns, random_.choice([0.0, 1.0, 0.25]))
    return episode


@pytest.mark.parametrize("seats", [[""], ["white", "black"]], ids=["one agent", "two seats"])
@pytest.mark.parametrize("seed", range(10))
def test_random_trees_have_the_advantages_of_the_formulas(seats: list[str], seed: int) -> None:
    random_ = random.Random(seed)
    episodes = [random_episode(random_, seats, 10 + 100 * i) for i in range(4)]
    for estimator in ESTIMATORS:
        settings: dict[str, Any] = {"estimator": estimator, "normalizeStd": True}
        check(episodes, by_seat(episodes, estimator), **settings)
        turns = by_turn(episodes, estimator, 0.9)
        check(episodes, turns, **settings, turnAdvantage={"gamma": 0.9})
