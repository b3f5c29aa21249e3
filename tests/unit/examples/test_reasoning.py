"""examples/reasoning: solutions that its models learn from at first are right, and what is held out
is in no training row."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from sluice.rewards import RewardInput
from sluice_rollout.tools import ANSWER, hermes_calls

EXAMPLE = Path(__file__).parents[3] / "examples/reasoning"
COUNTDOWN = {"min_numbers": 3, "max_numbers": 4, "max_value": 20, "min_target": 1}
ARITHMETIC = {"max_terms": 6, "max_digits": 3}
PROBLEMS = 50


@pytest.fixture(scope="module")
def tasks() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "tasks.py"))


@pytest.fixture(scope="module")
def countdown() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "countdown.py"))


@pytest.fixture(scope="module")
def calculator() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "calculator.py"))


def sample(row: dict[str, Any], response: str, **metadata: Any) -> RewardInput:
    return RewardInput(row["prompt"], response, row["label"], row["metadata"] | metadata)


def test_worked_solutions_of_countdown_are_right_answers(
    tasks: dict[str, Any], countdown: dict[str, Any]
) -> None:
    problems = tasks["rows"]("countdown", PROBLEMS, seed=1, **COUNTDOWN)
    worked = list(countdown["worked"](PROBLEMS, seed=1, **COUNTDOWN))
    for problem, row in zip(problems, worked, strict=True):
        question, answer = row["messages"]
        assert [question] == problem["prompt"]
        assert countdown["right"](sample(problem, answer["content"])) == 1.0
    lengths = {len(row["messages"][1]["content"].splitlines()) for row in worked}
    assert lengths == set(range(2, 9)), "up to six tries that fail, one that does not, the answer"


@pytest.mark.parametrize(
    ("response", "paid"),
    [
        pytest.param("10+2=12, 12-5=7\n(10+2)-5", 1, id="right"),
        pytest.param("(10+2)-5\n", 1, id="without tries"),
        pytest.param("10+2=12, 12-5=7", 0, id="never answered"),
        pytest.param("(10-2)+5", 0, id="another number"),
        pytest.param("10+2", 0, id="a number left"),
        pytest.param("7", 0, id="the target itself"),
        pytest.param("9**9**9**9", 0, id="takes for ever"),
        pytest.param("print(1)", 0, id="a program"),
        pytest.param("", 0, id="nothing"),
    ],
)
def test_countdown_pays_for_the_right_expression_only(
    countdown: dict[str, Any], response: str, paid: float
) -> None:
    facts = {"source_dataset": "countdown", "numbers": [10, 5, 2], "target": 7}
    problem = {"answer": "10 + 2 - 5", "metadata": facts}
    row = {"prompt": "?", "label": problem["answer"], "metadata": {"problem": problem}}
    assert countdown["right"](sample(row, response)) == paid


def test_worked_solutions_with_the_calculator_call_it_and_are_right(
    calculator: dict[str, Any],
) -> None:
    problems = calculator["rows"](PROBLEMS, seed=1, **ARITHMETIC)
    worked = calculator["worked"](PROBLEMS, seed=1, **ARITHMETIC)
    for problem, row in zip(problems, worked, strict=True):
        start, turns = row["messages"][:2], row["messages"][2:]
        assert start == problem["prompt"]
        for turn, answer in zip(turns[0:-1:2], turns[1::2], strict=True):
            (call,) = hermes_calls(turn["content"])
            assert not call.error
            assert calculator[call.name](**call.arguments) == answer["content"]
        assert calculator["right"](sample(problem, "", **{ANSWER: turns[-1]["content"]})) == 1.0


@pytest.mark.parametrize("expression", ["1 + 2 + 3", "9 ** 9", "seven", "1 / 0", ""])
def test_the_calculator_tells_the_model_what_it_expects(
    calculator: dict[str, Any], expression: str
) -> None:
    with pytest.raises(ValueError, match="expected one operation on two whole numbers"):
        calculator["calculate"](expression)


@pytest.mark.parametrize(
    ("answer", "paid"),
    [
        pytest.param("-12", 1, id="right"),
        pytest.param("12", 0, id="wrong"),
        pytest.param('<tool_call>{"name": "calculate"}</tool_call> -12', 0, id="still calls"),
    ],
)
def test_the_last_turn_is_the_answer(calculator: dict[str, Any], answer: str, paid: float) -> None:
    problem = {"answer": "-12", "metadata": {"source_dataset": "basic_arithmetic"}}
    row = {"prompt": "?", "label": "-12", "metadata": {"problem": problem}}
    assert calculator["right"](sample(row, "-12", **{ANSWER: answer})) == paid


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        pytest.param("chain_sum", {"max_terms": 3, "max_digits": 1}, id="small numbers"),
        pytest.param("countdown", COUNTDOWN, id="any order"),
    ],
)
def test_no_training_row_has_the_numbers_of_a_held_out_one(
    tasks: dict[str, Any], task: str, settings: dict[str, Any]
) -> None:
    def numbers(**more: Any) -> set[tuple[str, ...]]:
        rows = tasks["rows"](task, 300, **settings, **more)
        return {tuple(sorted(tasks["NUMBER"].findall(row["prompt"][0]["content"]))) for row in rows}

    held_out = numbers(held_out=True)
    assert held_out
    assert held_out.isdisjoint(numbers(seed=1) | numbers(seed=2))
    assert numbers(seed=1) != numbers(seed=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param('{"expression": "7 * 18"}', "126", id="a result"),
        pytest.param('{"expression": "7 * 18 + 1"}', "error: expected one operation", id="two"),
        pytest.param('{"text": "7 * 18"}', "error: ", id="another argument"),
        pytest.param('{"expression": 7}', "error: ", id="a number"),
        pytest.param("[]", "error: ", id="no arguments"),
        pytest.param("{", "error: ", id="no JSON"),
    ],
)
def test_the_agents_calculator_answers_every_call(arguments: str, said: str) -> None:
    agent = runpy.run_path(str(EXAMPLE / "calculator_agent.py"))
    assert agent["said"](arguments).startswith(said)
