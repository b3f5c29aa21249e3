"""Functions of an interactive session are written into modules."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.rewards import RewardInput
from sluice_client.errors import ClientError
from sluice_client.function_source import file_of, source_of

SESSION = """
import json as j
import re
from pathlib import Path
from sluice.rewards import RewardInput

WORDS = {"yes": 1.0, "no": [0.0, None]}
OPEN = open("/dev/null")

def first(text):
    return re.split(r"\\s+", text)[0]

def reward(sample: RewardInput) -> float:
    def inner(word):
        return WORDS.get(word, 0.5)
    return inner(first(sample.response)) if Path("x").name else j.loads("0")

def leaning(sample):
    return OPEN.read()

def maker():
    bound = 3
    def inside(sample):
        return bound
    return inside
"""


@pytest.fixture
def session(tmp_path: Path) -> dict[str, Any]:
    """Names of a session, whose functions have a source that can be found."""
    path = tmp_path / "session_of_a_person.py"
    path.write_text(SESSION)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SESSION, str(path), "exec"), names)
    return names


def test_the_written_module_can_be_imported(session: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "packed.py").write_text(source_of(session["reward"]))
    check = (
        "import json, types, packed\n"
        "rewards = [packed.reward(types.SimpleNamespace(response=text)) for text in "
        "('yes it is', 'perhaps')]\n"
        "print(json.dumps(rewards))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.stderr == ""
    assert json.loads(ran.stdout) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        pytest.param(
            lambda names: names["leaning"],
            "leaning uses OPEN, a TextIOWrapper of this session, which cannot be written",
            id="an open file",
        ),
        pytest.param(lambda names: names["maker"](), "is defined inside another", id="a closure"),
        pytest.param(
            lambda names: functools.partial(names["reward"]), "with __call__", id="an object"
        ),
    ],
)
def test_functions_that_cannot_be_written_are_refused(
    session: dict[str, Any], choose: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(ClientError, match=message):
        source_of(choose(session))


def of_this_file(sample: RewardInput) -> float:
    return float(bool(sample.response))


def test_a_function_of_a_module_is_named_by_its_file(session: dict[str, Any]) -> None:
    assert file_of(of_this_file) == Path(__file__).resolve()
    assert file_of(session["reward"]) is None
