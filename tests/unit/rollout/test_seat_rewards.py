"""Rewards of a sample and its seats, derived from those that were given or judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sluice.samples.sample import Prompt, Sample, SampleStatus, TokenSequence
from sluice.samples.turns import BRANCH_TURNS, TURNS
from sluice_rollout.scoring import seat_rewards


def sample(seats: tuple[str, ...], of_turns: dict[str, float] | None = None) -> Sample:
    """Return a sample with a token of each seat, in this order."""
    scored = Sample(0, status=SampleStatus.COMPLETED, response="0")
    scored.branches = [TokenSequence() for _ in seats[1:]]
    records = []
    for number, (seat, sequence) in enumerate(zip(seats, scored.sequences, strict=True)):
        sequence.tokens, sequence.seat = np.array([7, number], np.int32), seat
        sequence.response_length = 1
        reward = (of_turns or {}).get(seat, 0.0)
        records.append([{"by": "model", "length": 1, "turn": number, "reward": reward}])
    scored.metadata = {TURNS: records[0], BRANCH_TURNS: records[1:]}
    return scored


BOTH = ("white", "black")


@pytest.mark.parametrize(
    ("seats", "reward", "own", "of_turns", "expected"),
    [
        pytest.param(("",), 0.5, {}, {}, (0.5, {}), id="a sample without seats"),
        pytest.param(("",), 0.5, {}, {"": 0.25}, (0.75, {}), id="rewards of turns are added"),
        pytest.param(BOTH, None, {"white": 1.0, "black": -1.0}, {},
                     (0, {"white": 1, "black": -1}), id="the mean of the seats"),
        pytest.param(BOTH, 1.0, {}, {}, (1, {"white": 1, "black": 1}), id="a shared reward"),
        pytest.param(BOTH, 0.5, {"white": 1.0}, {},
                     (0.5, {"white": 1, "black": 0.5}), id="one of its own, one shared"),
        pytest.param(BOTH, None, {"white": 1.0, "black": 0.0}, {"black": 0.5},
                     (0.75, {"white": 1, "black": 0.5}), id="turns of a seat"),
        pytest.param(("white",), None, {"white": 1.0, "black": 0.0}, {},
                     (0.5, {"white": 1, "black": 0}), id="a seat that never spoke"),
    ],
)  # fmt: skip
def test_missing_rewards_are_derived_from_others(
    seats: tuple[str, ...],
    reward: float | None,
    own: dict[str, float],
    of_turns: dict[str, float],
    expected: tuple[float, dict[str, float]],
) -> None:
    scored = sample(seats, of_turns)
    scored.reward, scored.seat_rewards = reward, dict(own)
    seat_rewards.settle(scored)
    assert (scored.reward, scored.seat_rewards) == expected


@pytest.mark.parametrize(
    ("seats", "reward", "own", "missing"),
    [
        pytest.param(("",), None, {}, [""], id="a sample"),
        pytest.param(("",), 1.0, {}, [], id="a sample that has one"),
        pytest.param(BOTH, None, {}, ["white", "black"], id="both seats"),
        pytest.param(BOTH, None, {"white": 1.0}, ["black"], id="one seat"),
        pytest.param(BOTH, None, {"white": 1.0, "black": 1.0}, [], id="no seat"),
        pytest.param(BOTH, 1.0, {}, [], id="they share one"),
    ],
)
def test_seats_without_a_reward_are_still_to_be_judged(
    seats: tuple[str, ...], reward: float | None, own: dict[str, float], missing: list[str]
) -> None:
    scored = sample(seats)
    scored.reward, scored.seat_rewards = reward, own
    assert seat_rewards.missing(scored) == missing


def test_a_reward_sees_the_response_and_the_name_of_the_seat() -> None:
    def text(tokens: list[int], stop: str | None) -> str:
        return " ".join(map(str, tokens))

    scored = sample(BOTH)
    scored.metadata["seats"] = {"black": {"answer": "b"}}
    prompt: Any = Prompt(0, "?", label="l", metadata={"seat": "row's", "level": 3})
    seen = seat_rewards.reward_input(prompt, scored, "black", text)
    assert (seen.response, seen.tokens, seen.response_length) == ("1", [7, 1], 1)
    metadata = {name: seen.metadata[name] for name in ("seat", "level", "answer")}
    assert metadata == {"seat": "black", "level": 3, "answer": "b"}


def test_a_judgement_of_a_seat_keeps_its_parts_apart() -> None:
    scored = sample(BOTH)
    seat_rewards.give(scored, "white", (1.0, {"score": 1.0, "format": 0.5}))
    assert scored.seat_rewards == {"white": 1.0}
    assert scored.reward_parts == {"white/score": 1.0, "white/format": 0.5}
