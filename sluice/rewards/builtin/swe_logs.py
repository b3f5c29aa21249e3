"""Reads which tests have passed from the output of test runners.

Each parser returns the outcome of every test by name. A name that occurs more than once has its
worst outcome: a runner prints a failed test in several places, and tests of the same name may be in
several files. What the tested code prints is part of the output, so a line that claims that a test
has passed does not hide one that says it has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum


class Outcome(IntEnum):
    """How a test has ended, from the best to the worst."""

    PASSED = 0
    SKIPPED = 1
    FAILED = 2


Outcomes = dict[str, Outcome]
Parser = Callable[[str], Outcomes]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# As in SWE-bench, an expected failure counts as passed.
_WORDS = {
    **dict.fromkeys(
        ("PASSED", "XFAIL", "ok", "expected failure", "PASS", "✓", "√"), Outcome.PASSED
    ),
    **dict.fromkeys(("SKIPPED", "SKIP", "skipped", "ignored", "○"), Outcome.SKIPPED),
    **dict.fromkeys(
        ("FAILED", "ERROR", "XPASS", "FAIL", "unexpected success", "✕", "×"), Outcome.FAILED
    ),
}
_PYTEST_WORD = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
# `PASSED tests/test_a.py::test_b[1 - 2]`, of -rA; for a failure ` - ` and its message follow.
_PYTEST_SUMMARY = re.compile(rf"^({_PYTEST_WORD}) ([^\s\[]+(?:\[.*?\](?=$| - ))?)(?: - .*)?$")
# `tests/test_a.py::test_b PASSED [ 50%]`, of -v.
_PYTEST_LINE = re.compile(
    rf"^([^\s\[]+::[^\s\[]+(?:\[.*?\])?) ({_PYTEST_WORD})(?: \(.*\))?(?: +\[ *\d+%\])?$"
)
_UNITTEST_NAME = re.compile(r"^(\w+) \(([\w.]+)\)(?: \.\.\.(.*))?$")
_UNITTEST_END = re.compile(
    r"(?:^|\s)(ok|FAIL|ERROR|expected failure|unexpected success|skipped\b.*)$"
)
_UNITTEST_FAILURE = re.compile(r"^(?:FAIL|ERROR|UNEXPECTED SUCCESS): (\w+) \(([\w.]+)\)")
_GO = re.compile(r"^\s*--- (PASS|FAIL|SKIP): (\S+)")
_CARGO = re.compile(r"^test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)\b")
_JEST = re.compile(r"^(\s*)([✓√✕×○]) (?:skipped )?(.+?)(?: \(\d+(?:\.\d+)? m?s\))?$")
_JEST_GROUP = re.compile(r"^(\s+)(\S.*)$")
_JEST_FILE = re.compile(r"^(?:PASS|FAIL)\s")


def pytest(log: str) -> Outcomes:
    """Read `pytest -rA` or `pytest -v`. Names are node ids.

    A test is found by the first word of its node id as well: SWE-bench's lists have no more of it.
    """
    outcomes: Outcomes = {}
    for line in _lines(log):
        if found := _PYTEST_SUMMARY.match(line):
            word, name = found[1], found[2]
        elif found := _PYTEST_LINE.match(line):
            word, name = found[2], found[1]
        else:
            continue
        _note_all(outcomes, tuple({name, name.split(" ")[0]}), word)
    return outcomes


def unittest(log: str) -> Outcomes:
    """Read `python -m unittest -v`, and Django's test runner.

    A test is found as `test_a (module.Class.test_a)`, `module.Class.test_a`, and as older Pythons
    print it: `test_a (module.Class)`.
    """
    outcomes: Outcomes = {}
    names: tuple[str, ...] = ()  # of the test whose end has not been printed yet
    for line in _lines(log):
        if found := _UNITTEST_FAILURE.match(line):
            _note_all(outcomes, _unittest_names(found[1], found[2]), "FAIL")
            continue
        rest = line
        if found := _UNITTEST_NAME.match(line):
            names, rest = _unittest_names(found[1], found[2]), found[3] or ""
        # The first line of a docstring, or what the test prints, may be between name and end.
        if names and (end := _UNITTEST_END.search(rest)):
            _note_all(outcomes, names, "skipped" if end[1].startswith("skipped") else end[1])
            names = ()
    return outcomes


def _unittest_names(method: str, path: str) -> tuple[str, ...]:
    class_path = path.removesuffix(f".{method}")
    whole = f"{class_path}.{method}"
    return f"{method} ({whole})", whole, f"{method} ({class_path})"


def go(log: str) -> Outcomes:
    """Read `go test -v`. A subtest is `TestParent/name`."""
    outcomes: Outcomes = {}
    for line in _lines(log):
        if found := _GO.match(line):
            _note(outcomes, found[2], found[1])
    return outcomes


def cargo(log: str) -> Outcomes:
    """Read `cargo test`. Names are paths: `module::tests::name`."""
    outcomes: Outcomes = {}
    for line in _lines(log):
        if found := _CARGO.match(line):
            _note(outcomes, found[1], found[2])
    return outcomes


def jest(log: str) -> Outcomes:
    """Read `jest --verbose`. A test is found by its name, and after the names of its groups.

    `add` of the group `numbers` is `add`, `numbers add` and `numbers > add`.
    """
    outcomes: Outcomes = {}
    groups: list[tuple[int, str]] = []  # indentation and name
    for line in _lines(log):
        if not line.strip() or _JEST_FILE.match(line):
            groups = [] if line.strip() else groups
        elif found := _JEST.match(line):
            path = [name for indent, name in groups if indent < len(found[1])] + [found[3]]
            keys = dict.fromkeys((found[3], " ".join(path), " > ".join(path)))
            _note_all(outcomes, tuple(keys), found[2])
        elif found := _JEST_GROUP.match(line):
            indent = len(found[1])
            groups = [group for group in groups if group[0] < indent] + [(indent, found[2])]
    return outcomes


PARSERS: dict[str, Parser] = {
    "pytest": pytest,
    "unittest": unittest,
    "go": go,
    "cargo": cargo,
    "jest": jest,
}


def _lines(log: str) -> list[str]:
    """Return the lines without colours."""
    return [line.rstrip() for line in _ANSI.sub("", log).split("\n")]


def _note_all(outcomes: Outcomes, names: tuple[str, ...], word: str) -> None:
    for name in names:
        _note(outcomes, name, word)


def _note(outcomes: Outcomes, name: str, word: str) -> None:
    outcomes[name] = max(outcomes.get(name, Outcome.PASSED), _WORDS[word])
