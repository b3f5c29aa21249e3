"""Reward functions may have the parameters of slime or verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.rewards import RewardInput
from sluice.runtime.user_code import load_reward

FUNCTIONS = """
def slime(args, sample, **kwargs):
    return ("slime", args.rm_url, sample.response, sample.metadata["k"])
def verl(data_source, solution_str, ground_truth, extra_info=None):
    return (data_source, solution_str, ground_truth, extra_info["k"])
def verl_short(solution_str, ground_truth): return (solution_str, ground_truth)
def verl_open(solution_str, ground_truth, **rest): return sorted(rest)
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("slime", ("slime", None, "r", "v")),
        ("verl", ("src", "r", "l", "v")),
        ("verl_short", ("r", "l")),
        ("verl_open", ["data_source", "extra_info"]),
    ],
)
def test_a_function_gets_the_arguments_of_its_project(
    tmp_path: Path, name: str, expected: Any
) -> None:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    sample = RewardInput(
        prompt="p", response="r", label="l", metadata={"k": "v", "data_source": "src"}
    )
    assert load_reward(f"{path}:{name}")(sample) == expected
