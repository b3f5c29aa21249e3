"""An exception in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.runtime import error_summary, user_code

CODE = """
import json

def own(x):
    raise ValueError(f"bad\\nand more")

def librarys(x):
    return json.loads("{")

def silent(x):
    assert x is None
"""


def raised(function: Any) -> Exception:
    try:
        function(1)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("own", "ValueError: bad (mine.py:5)"),
        (
            "librarys",
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 "
            "(char 1) (mine.py:8)",
        ),
        ("silent", "AssertionError (mine.py:11)"),
    ],
)
def test_the_line_names_the_users_own_line(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    user_code.load.cache_clear()
    assert error_summary.cause(raised(user_code.load(f"{tmp_path}/mine.py:{name}"))) == line


def test_without_a_users_line_the_innermost_counts() -> None:
    error = raised(lambda _: json.loads("{"))
    trace = error.__traceback__
    while trace and "json" not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    assert error_summary.raised_at(error.with_traceback(trace)).startswith("decoder.py:")


def test_a_long_message_is_cut() -> None:
    assert len(error_summary.cause(ValueError("x" * 10_000))) < error_summary.LONGEST + 50


def test_an_error_that_nobody_raised_has_no_place() -> None:
    assert error_summary.cause(KeyError("x")) == "KeyError: 'x'"
