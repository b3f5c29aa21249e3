"""Observations of Gymnasium's environments as text."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy
import pytest

from sluice_rollout.environments import gym_text as text


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        pytest.param("a wall\n", "a wall\n", id="a text"),
        pytest.param(7, "7", id="a number"),
        pytest.param(numpy.int64(7), "7", id="a number of numpy's"),
        pytest.param((14, 10, False), "[14, 10, false]", id="a tuple"),
        pytest.param(numpy.array([0.1, 2], numpy.float32), "[0.1, 2.0]", id="an array"),
        pytest.param({"room": "hall", "doors": [1, 2]}, "room: hall\ndoors: [1, 2]", id="a dict"),
        pytest.param({"at": {"x": numpy.int8(1)}}, 'at: {"x": 1}', id="a dict in a dict"),
        pytest.param(["left", "é"], '["left", "é"]', id="texts"),
        pytest.param(None, "null", id="nothing"),
    ],
)
def test_an_observation_is_text(observation: Any, words: str) -> None:
    assert text.shown(observation) == words


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        pytest.param(numpy.zeros((8, 8, 12)), "768 numbers, as in a picture", id="a picture"),
        pytest.param({"a": [0] * 300, "b": [0] * 300}, "600 numbers, as in", id="in parts"),
        pytest.param({"screen": object()}, "an observation with a object", id="an object"),
    ],
)
def test_an_observation_that_cannot_be_text_is_an_error(observation: Any, words: str) -> None:
    with pytest.raises(text.NoTextError, match=words):
        text.shown(observation)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        pytest.param("FrozenLake-v1", ["[S]FFF", "FHFH", "FFFH", "HFFG"], id="FrozenLake"),
        pytest.param(
            "Taxi-v4",
            [
                "+---------+",
                "|<R>: | : :G|",
                "| : | : : |",
                "| : :[ ]: : |",
                "| | : | : |",
                "|Y| : |*B*: |",
                "+---------+",
            ],
            id="Taxi",
        ),
    ],
)
def test_styles_of_a_drawing_become_marks(name: str, lines: list[str]) -> None:
    env = gymnasium.make(name, render_mode="ansi")
    env.reset(seed=1)
    picture = env.render()
    assert isinstance(picture, str)
    assert text.drawn(picture).splitlines() == lines


def test_a_place_with_several_colours_shows_all_of_them() -> None:
    """In Taxi, the passenger may wait at the taxi's place."""
    assert text.drawn("|\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m: |") == "|*[R]*: |"
