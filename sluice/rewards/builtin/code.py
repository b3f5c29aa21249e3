"""Programs: run the last Python block of a response against the row's tests in the sandbox.

`score` is 1 if every test passes, else 0; `passed` is the share of tests that pass (`reward.key:
passed` gives partial credit). A program that is wrong, crashes or times out gets 0 and is trained
on. Only a row with unreadable tests fails its sample. Expected outputs never enter the sandbox:
they are compared in this process.
"""

from __future__ import annotations

import math
import re
import time
from functools import cache
from typing import Any

from sluice.rewards.builtin.code_cases import Case, cases_of, read_json
from sluice.rewards.builtin.extraction import after_thinking
from sluice.rewards.judging import configuration
from sluice.rewards.sandbox import ProgramRun, Sandbox, hide
from sluice.rewards.types import RewardInput

_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})"
    r"[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^[ \t]*(?P=fence)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("python", "python3", "py")
_SHARE_OF_TIME = (
    0.9  # share of a sample's time limit after which the judge would take this process for hung
)
_PROGRAM_BYTES = 1 << 20


def code(sample: RewardInput) -> dict[str, float]:
    tests = cases_of(sample)
    program = _program(sample.response)
    limits = configuration.current()
    end = time.monotonic() + _SHARE_OF_TIME * limits.timeout_seconds
    passed = 0
    for test in tests if program else []:
        seconds = min(limits.test_seconds, end - time.monotonic())
        if seconds <= 0:
            break
        ran = _sandbox().run(
            source=program,
            seconds=seconds,
            memory=limits.memory,
            cpu_seconds=math.ceil(seconds) + 1,
            **test.request,
        )
        passed += _passes(test, ran)
        if ran.status == "timeout":  # the next ones probably would, and the group waits
            break
    return {"score": float(passed == len(tests)), "passed": passed / len(tests)}


@cache
def _sandbox() -> Sandbox:
    hide()  # this process's memory holds the expected outputs
    return Sandbox()


def _program(response: str) -> str:
    """Return the last block that is labelled Python, else the last one without a label.

    Behind a labelled block, one without a label is sample output. A response without any block is
    the program itself.
    """
    text = after_thinking(response)
    blocks = [(match["language"].lower(), _body(match)) for match in _BLOCK.finditer(text)]
    labelled = [body for language, body in blocks if language in _PYTHON]
    unlabelled = [body for language, body in blocks if not language]
    fenced = "```" in text or "~~~" in text
    program = (labelled or unlabelled or ["" if fenced else text])[-1]
    return program if len(program) <= _PROGRAM_BYTES and "\0" not in program else ""


def _body(block: re.Match[str]) -> str:
    """Return the text of a block without the indentation of its fence (CommonMark, 4.5)."""
    indent = len(block["indent"].expandtabs(4))
    return re.sub(rf"^[ \t]{{0,{indent}}}", "", block["body"], flags=re.MULTILINE)


def _passes(test: Case, ran: ProgramRun) -> bool:
    if ran.status != "ok":
        return False
    if "check" in test.request:
        return True
    if "call" not in test.request:
        return same_output(ran.output, str(test.expected))
    try:
        return same_value(read_json(ran.output), test.expected)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return False


def same_output(output: str, expected: str) -> bool:
    """Compare outputs line by line and word by word, decimals to 1e-6.

    Spaces around words and empty lines at the end do not count.
    """
    ours, theirs = (
        [line.split() for line in text.rstrip().split("\n")] for text in (output, expected)
    )
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if "." not in theirs and "." not in ours:
        return False
    try:
        a, b = float(ours), float(theirs)
    except ValueError:
        return False
    return math.isfinite(a) and math.isfinite(b) and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def same_value(ours: Any, expected: Any) -> bool:
    """Compare JSON values, decimals to 1e-6.

    APPS may wrap the expected value into a list of one.
    """
    wrapped = isinstance(expected, list) and len(expected) == 1 and _equal(ours, expected[0])
    return wrapped or _equal(ours, expected)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, float) or isinstance(b, float):
        try:
            return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
        except (TypeError, OverflowError):  # not a number, or an integer beyond all floats
            return False
    return bool(a == b)
