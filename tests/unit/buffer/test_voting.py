"""Majority votes of evaluations, by hand."""

from __future__ import annotations

import pytest

from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import SampleFacts
from sluice_buffer.rules.voting import majority, votes


def facts(*rewards: float) -> list[SampleFacts]:
    return [SampleFacts(4, 2, 2, pb.SAMPLE_STATUS_COMPLETED, r, 0, 0) for r in rewards]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        pytest.param([7.0, 3.0, 7.0, None], "0 1 0 -", id="two answers"),
        pytest.param([None, None], "", id="none"),
        pytest.param([], "", id="no samples"),
    ],
)
def test_answers_are_numbered_as_they_come(answers: list[float | None], text: str) -> None:
    assert votes(answers) == text


@pytest.mark.parametrize(
    ("rewards", "text", "expected"),
    [
        pytest.param([1, 0, 1, 0], "0 1 0 2", {"maj@2": 0.5 * (1 + 1), "maj@4": 1}, id="most"),
        pytest.param([0, 1, 1, 1], "0 1 1 1", {"maj@2": 0.5, "maj@4": 1}, id="a first tie"),
        pytest.param([0, 1, 0, 0], "0 1 0 0", {"maj@2": 0, "maj@4": 0}, id="wrong"),
        pytest.param([0, 0, 0, 1], "- - - 0", {"maj@2": 0.5, "maj@4": 1}, id="the silent"),
        pytest.param([1, 1, 0], "0 0 1", {"maj@2": 1}, id="a rest of one"),
        pytest.param([1, 1], "", {}, id="no answers"),
        pytest.param([1, 1], "0", {}, id="votes of others"),
    ],
)
def test_majorities(rewards: list[float], text: str, expected: dict[str, float]) -> None:
    assert majority([(facts(*rewards), text)], [1, 2, 4]) == pytest.approx(expected)


def test_a_rate_is_the_mean_of_the_groups_that_vote() -> None:
    groups = [(facts(1, 1), "0 0"), (facts(0, 0), "0 1"), (facts(1, 1), "")]
    assert majority(groups, [2]) == {"maj@2": 0.5}
