"""Rewards of the examples pay in the order in which a model from random weights can learn."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from sluice.rewards import RewardInput

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("response", "truncated", "paid"),
    [
        ("7", False, 1),
        ("7 7 7", False, 0.5),
        ("7", True, 0.5),
        ("8", False, 0),
        ("8 7", False, 0),
        ("", False, 0),
    ],
)
def test_the_quickstart_pays_for_the_end_after_the_right_digit_only(
    response: str, truncated: bool, paid: float
) -> None:
    positions = runpy.run_path(str(EXAMPLES / "quickstart/reward.py"))["positions"]
    assert positions(RewardInput("max 3 7 2 =", response, "7", truncated=truncated)) == paid


@pytest.mark.parametrize(
    ("game", "paid"),
    [
        ({"called": True, "answer": "1", "ended": True}, 1),
        ({"called": True, "answer": "1 1", "ended": True}, 2 / 3),
        ({"called": True, "answer": "1", "ended": False}, 2 / 3),
        ({"called": True, "answer": "2", "ended": True}, 1 / 3),
        ({"called": True, "answer": "", "ended": True}, 1 / 3),
        ({"called": False, "answer": "1", "ended": True}, 0),
    ],
    ids=str,
)
def test_the_game_with_tools_pays_for_the_call_then_the_digit_then_the_end(
    game: dict[str, Any], paid: float
) -> None:
    right = runpy.run_path(str(EXAMPLES / "tools/tools.py"))["right"]
    assert right(RewardInput("7 * 8 + 5 =", "", "1", metadata=game)) == paid


@pytest.mark.parametrize(
    ("tool", "calls", "said", "truncated", "paid"),
    [
        pytest.param("calculate", 1, "1", False, 1, id="called and read"),
        pytest.param("calculate", 1, "1", True, 0.5, id="never ended"),
        pytest.param("calculate", 1, "1 1", False, 0.5, id="another word"),
        pytest.param("calculate", 1, "2", False, 0.5, id="misread"),
        pytest.param("lookup", 1, "1", False, 0, id="the wrong tool"),
        pytest.param("calculate", 2, "1", False, 0, id="called twice"),
        pytest.param("", 0, "1", False, 0, id="a guess"),
    ],
)
def test_the_agent_is_paid_for_the_right_call_then_the_answer(
    tool: str, calls: int, said: str, truncated: bool, paid: float
) -> None:
    right = runpy.run_path(str(EXAMPLES / "agents/openai/reward.py"))["right"]
    response = f'<tool_call>{{"name":"{tool}","arguments":{{}}}}</tool_call> {said}'
    metadata = {"tool_calls": calls, "said": said}
    sample = RewardInput("7 * 8 + 5 =", response, "1", metadata=metadata, truncated=truncated)
    assert right(sample) == paid


@pytest.mark.parametrize(
    ("calls", "printed", "paid"),
    [
        pytest.param(2, "4.0", 1, id="mended"),
        pytest.param(1, "4.0", 1, id="right at once"),
        pytest.param(2, "", 0.2, id="not mended"),
        pytest.param(0, "", 0, id="no program"),
    ],
)
def test_the_agent_that_writes_code_is_paid_for_what_it_prints(
    calls: int, printed: str, paid: float
) -> None:
    right = runpy.run_path(str(EXAMPLES / "agents/code/reward.py"))["right"]
    metadata = {"tool_calls": calls, "printed": printed}
    assert right(RewardInput("task ( ) =", "", "4.0", metadata=metadata)) == paid


@pytest.mark.parametrize(
    ("passage", "said", "truncated", "paid"),
    [
        pytest.param("the depth of borv is 7.", "7", False, 1, id="searched and read"),
        pytest.param("the depth of borv is 7.", "7", True, 0.5, id="never ended"),
        pytest.param("the depth of borv is 7.", "1", False, 0.5, id="misread"),
        pytest.param("the age of borv is 7.", "7", False, 0, id="another property"),
        pytest.param("the depth of tuzt is 7.", "7", False, 0, id="another thing"),
        pytest.param("", "7", False, 0, id="a guess"),
    ],
)
def test_the_agent_that_searches_is_paid_for_the_passage_then_the_answer(
    passage: str, said: str, truncated: bool, paid: float
) -> None:
    right = runpy.run_path(str(EXAMPLES / "agents/search/reward.py"))["right"]
    metadata = {"passage": passage, "said": said}
    assert right(RewardInput("borv depth", "", "7", metadata=metadata, truncated=truncated)) == paid
