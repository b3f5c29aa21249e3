"""Answers of a model as actions of Gymnasium's spaces."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from gymnasium import spaces

from sluice_rollout.environments import gym_actions as actions

FOUR = spaces.Discrete(4)
MOVES = ["left", "down", "right", "up"]
PAIR = spaces.MultiDiscrete([3, 4])
FORCE = spaces.Box(-1.0, 1.0, (2,))
NESTED = spaces.Dict({"go": FOUR, "turn": spaces.Tuple([FOUR, spaces.Text(9)])})


@pytest.mark.parametrize(
    ("answer", "names", "action"),
    [
        pytest.param("right", MOVES, 2, id="a name"),
        pytest.param("Not left, but **Right**.", MOVES, 2, id="the last one"),
        pytest.param("<think>left or up</think>\ndown", MOVES, 1, id="no thoughts"),
        pytest.param("upright, downs: left", MOVES, 0, id="words alone"),
        pytest.param("go UP LEFT", ["left", "up", "up left", "stay"], 2, id="the longest name"),
        pytest.param("up. (2 of 3)", MOVES, 3, id="names, not numbers"),
        pytest.param("I choose 2.", None, 2, id="a number"),
        pytest.param("of 0 to 3: 1, not 2.5, 12, -3, 99 or x3", None, 1, id="whole numbers"),
    ],
)
def test_the_last_action_of_an_answer_counts(
    answer: str, names: list[str] | None, action: int
) -> None:
    assert actions.actions_of(FOUR, names).parse(answer) == action


def test_a_discrete_space_may_start_at_another_number() -> None:
    parser = actions.actions_of(spaces.Discrete(3, start=-1), None)
    assert [parser.parse(answer) for answer in ("-1", "go 0", "1")] == [-1, 0, 1]
    assert parser.description == "an integer from -1 to 1"


@pytest.mark.parametrize(
    ("space", "answer", "action"),
    [
        pytest.param(PAIR, "[0, 0] is worse than [2, 3]", [2, 3], id="a list of integers"),
        pytest.param(PAIR, "[2, 3], not [3, 4]", [2, 3], id="the last that is an action"),
        pytest.param(FORCE, "```json\n[0.5, -1]\n```", [0.5, -1], id="a list of numbers"),
        pytest.param(spaces.Box(0, 5, ()), "3", 3, id="one number"),
        pytest.param(spaces.MultiBinary(3), "[1, 0, 1]", [1, 0, 1], id="bits"),
    ],
)
def test_arrays_are_written_as_json(space: Any, answer: str, action: Any) -> None:
    result = actions.actions_of(space, None).parse(answer)
    assert space.contains(result)
    assert numpy.array_equal(result, action)


def test_parts_of_an_action_have_their_types() -> None:
    parser = actions.actions_of(NESTED, None)
    assert parser.parse('{"go": 1, "turn": [2, "now"]}') == {"go": 1, "turn": (2, "now")}


@pytest.mark.parametrize(
    ("space", "words"),
    [
        pytest.param(FOUR, "an integer from 0 to 3", id="Discrete"),
        pytest.param(PAIR, "JSON: a list of 2 integers from 0 to [2, 3]", id="MultiDiscrete"),
        pytest.param(FORCE, "JSON: a list of 2 numbers from -1 to 1", id="Box"),
        pytest.param(spaces.Box(0, numpy.inf, (1,)), "JSON: a list of one number from 0", id="one"),
        pytest.param(spaces.MultiBinary([2, 2]), "2 x 2 numbers, each 0 or 1", id="MultiBinary"),
        pytest.param(
            NESTED,
            'JSON: an object with "go": an integer from 0 to 3; "turn": a list of: an integer '
            "from 0 to 3; a text",
            id="Dict",
        ),
    ],
)
@pytest.mark.parametrize("answer", ["", "somewhere", "[9, 9, 9]", '{"go": 7}', "[7, 7, 7, 7"])
def test_the_error_of_an_invalid_action_says_what_was_expected(
    space: Any, words: str, answer: str
) -> None:
    parser = actions.actions_of(space, None)
    with pytest.raises(actions.ActionError) as raised:
        parser.parse(answer)
    assert str(raised.value).startswith("expected ")
    assert words in str(raised.value)


def test_texts_are_actions_as_they_are() -> None:
    assert (
        actions.actions_of(None, None).parse("<think>hm</think> open the door ") == "open the door"
    )
    word = actions.actions_of(spaces.Text(4, charset="abc"), None)
    assert (word.parse("cab"), word.description) == ("cab", "")
    with pytest.raises(actions.ActionError, match=r"expected a text of Text\(1, 4"):
        word.parse("crab")


@pytest.mark.parametrize(
    ("space", "names", "words"),
    [
        pytest.param(FOUR, MOVES[:3], "expected 4 different names, one for each", id="too few"),
        pytest.param(FOUR, ["a", "A", "b", "c"], "expected 4 different names", id="twice"),
        pytest.param(
            PAIR, MOVES, "names require a Discrete space; .* MultiDiscrete", id="no names"
        ),
        pytest.param(None, MOVES, "this environment has no space of actions", id="texts"),
        pytest.param(spaces.Box(0, 1, (9, 9)), None, "81 numbers, which are too many", id="large"),
        pytest.param(spaces.Sequence(FOUR), None, "cannot become an action of Seq", id="a kind"),
    ],
)
def test_spaces_whose_actions_cannot_be_text_are_refused(
    space: Any, names: list[str] | None, words: str
) -> None:
    with pytest.raises(actions.SpaceError, match=words):
        actions.actions_of(space, names)
