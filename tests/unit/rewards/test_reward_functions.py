"""Reward functions are loaded by their path. Those of other projects: tests/unit/migrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.rewards import RewardInput
from sluice.runtime.user_code import LoadError, load, load_reward

USER = """
import functools
def sluice(sample): return ("sluice", sample.response)
def sluice_default(sample, factor=2): return ("default", sample.label)
class Judge:
    def __call__(self, sample): return ("object", sample.response)
judge = Judge()
partial = functools.partial(sluice_default, factor=3)
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "functions.py"
    path.write_text(USER)
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sluice", ("sluice", "r")),
        ("sluice_default", ("default", "l")),
        ("judge", ("object", "r")),
        ("partial", ("default", "l")),
    ],
)
def test_parameters(user: Path, name: str, expected: Any) -> None:
    sample = RewardInput(
        prompt="p", response="r", label="l", metadata={"k": "v", "data_source": "src"}
    )
    assert load_reward(f"{user}:{name}")(sample) == expected


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{file}:nothing", "has no function 'nothing'; it has sluice, "),
        ("/no/such.py:f", "there is no file"),
        ("a.b.c", "No module"),
        (
            "nonzero",
            "nonzero names no function; expected package.module.name or path/to/file.py:name",
        ),
        ("judge.py", "judge.py names no function"),
    ],
)
def test_a_wrong_path_says_what_there_is(user: Path, path: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        load(path.format(file=user))
