"""The reward `swe`, and the parsers of test output that it reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from sluice.rewards.builtin.swe import swe
from sluice.rewards.builtin.swe_logs import PARSERS, Outcome
from sluice.rewards.types import RewardError, RewardInput

PASSED, SKIPPED, FAILED = Outcome.PASSED, Outcome.SKIPPED, Outcome.FAILED

PYTEST = """
==================================== PASSES ====================================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::TestB::test_two[a b - 1]
XFAIL tests/test_a.py::test_known - a known bug
XPASS tests/test_a.py::test_no_longer - a known bug
SKIPPED [1] tests/test_a.py:7: no network
FAILED tests/test_a.py::test_three[x-1] - AssertionError: assert 1 == 2 - or so
ERROR tests/test_b.py - ImportError: no module
"""
PYTEST_VERBOSE = """
tests/test_a.py::test_one PASSED                                         [ 25%]
tests/test_a.py::test_two[a b] \x1b[31mFAILED\x1b[0m                      [ 50%]
tests/test_a.py::test_off SKIPPED (no network)                           [ 75%]
PASSED tests/test_a.py::test_two[a b]
"""
UNITTEST = """
test_one (tests.test_a.TestA.test_one) ... ok
test_two (tests.test_a.TestA.test_two)
What it is about. ... ok
test_three (tests.test_a.TestA.test_three) ... the tested code prints
FAIL
test_old (tests.test_a.TestA) ... ok
test_off (tests.test_a.TestA.test_off) ... skipped 'no network'
test_known (tests.test_a.TestA.test_known) ... expected failure
test_hidden (tests.test_a.TestA.test_hidden) ... ok

======================================================================
FAIL: test_hidden (tests.test_a.TestA.test_hidden) (number=2)
"""
GO = """
=== RUN   TestAdd
=== RUN   TestAdd/small_numbers
--- FAIL: TestAdd (0.00s)
    --- PASS: TestAdd/small_numbers (0.00s)
    --- FAIL: TestAdd/large (0.01s)
--- SKIP: TestNet (0.00s)
--- PASS: TestSub (0.00s)
FAIL
FAIL	example.org/calc	0.004s
"""
CARGO = """
running 4 tests
test tests::adds ... ok
test tests::divides - should panic ... ok
test tests::slow ... ignored
test tests::subtracts ... FAILED
test src/lib.rs - add (line 3) ... ok

test result: FAILED. 2 passed; 1 failed; 1 ignored
"""
JEST = """
PASS test/a.test.js
  numbers
    add
      ✓ small numbers (3 ms)
      ✕ large numbers
    ○ skipped later
  ✓ alone (1.5 ms)
FAIL test/b.test.js
  words
    ✓ small numbers
"""


@pytest.mark.parametrize(
    ("parser", "log", "expected"),
    [
        pytest.param(
            "pytest",
            PYTEST,
            {
                "tests/test_a.py::test_one": PASSED,
                "tests/test_a.py::TestB::test_two[a b - 1]": PASSED,
                "tests/test_a.py::TestB::test_two[a": PASSED,
                "tests/test_a.py::test_known": PASSED,
                "tests/test_a.py::test_no_longer": FAILED,
                "tests/test_a.py::test_three[x-1]": FAILED,
                "tests/test_b.py": FAILED,
            },
            id="pytest -rA",
        ),
        pytest.param(
            "pytest",
            PYTEST_VERBOSE,
            {
                "tests/test_a.py::test_one": PASSED,
                "tests/test_a.py::test_two[a b]": FAILED,
                "tests/test_a.py::test_two[a": FAILED,
                "tests/test_a.py::test_off": SKIPPED,
            },
            id="pytest -v",
        ),
        pytest.param(
            "go",
            GO,
            {
                "TestAdd": FAILED,
                "TestAdd/small_numbers": PASSED,
                "TestAdd/large": FAILED,
                "TestNet": SKIPPED,
                "TestSub": PASSED,
            },
            id="go test",
        ),
        pytest.param(
            "cargo",
            CARGO,
            {
                "tests::adds": PASSED,
                "tests::divides": PASSED,
                "tests::slow": SKIPPED,
                "tests::subtracts": FAILED,
                "src/lib.rs - add (line 3)": PASSED,
            },
            id="cargo test",
        ),
        pytest.param(
            "jest",
            JEST,
            {
                "small numbers": PASSED,
                "numbers add small numbers": PASSED,
                "numbers > add > small numbers": PASSED,
                "large numbers": FAILED,
                "numbers add large numbers": FAILED,
                "numbers > add > large numbers": FAILED,
                "later": SKIPPED,
                "numbers later": SKIPPED,
                "numbers > later": SKIPPED,
                "alone": PASSED,
                "words small numbers": PASSED,
                "words > small numbers": PASSED,
            },
            id="jest",
        ),
    ],
)
def test_a_parser_reads_each_outcome(parser: str, log: str, expected: dict[str, Outcome]) -> None:
    assert PARSERS[parser](log) == expected


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("tests.test_a.TestA.test_one", PASSED),
        ("test_one (tests.test_a.TestA)", PASSED),
        ("test_one (tests.test_a.TestA.test_one)", PASSED),
        ("tests.test_a.TestA.test_two", PASSED),
        ("tests.test_a.TestA.test_three", FAILED),
        ("test_old (tests.test_a.TestA)", PASSED),
        ("tests.test_a.TestA.test_off", SKIPPED),
        ("tests.test_a.TestA.test_known", PASSED),
        ("tests.test_a.TestA.test_hidden", FAILED),
        ("tests.test_a.TestA.test_none", None),
    ],
)
def test_a_test_of_unittest_has_three_names(name: str, outcome: Outcome | None) -> None:
    assert PARSERS["unittest"](UNITTEST).get(name) is outcome


SUITE = """
import unittest
class TestA(unittest.TestCase):
    def test_one(self):
        "A docstring."
        print("test_two (suite.TestA.test_two) ... ok")
    def test_two(self):
        self.assertEqual(1, 2)
    @unittest.skip("not now")
    def test_three(self): ...
"""


@pytest.mark.parametrize(
    ("runner", "prefix", "command"),
    [
        ("unittest", "suite.TestA.", ["-m", "unittest", "-v", "suite"]),
        (
            "pytest",
            "suite.py::TestA::",
            ["-m", "pytest", "-rA", "-p", "no:cacheprovider", "suite.py"],
        ),
    ],
)
def test_the_output_of_a_real_run_is_read(
    runner: str, prefix: str, command: list[str], tmp_path: Path
) -> None:
    """The first test prints that the second has passed."""
    (tmp_path / "suite.py").write_text(textwrap.dedent(SUITE))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    outcomes = PARSERS[runner](done.stdout)
    assert outcomes[f"{prefix}test_one"] is PASSED
    assert outcomes[f"{prefix}test_two"] is FAILED
    assert outcomes.get(f"{prefix}test_three") in (SKIPPED, None)


@pytest.mark.parametrize("parser", PARSERS)
def test_any_text_is_read_in_linear_time(parser: str) -> None:
    for text in ("", "\0\n\x1b[", "[" * 200_000, "test " * 50_000, "PASSED a[" + "] - " * 50_000):
        PARSERS[parser](text)


LOG = "PASSED a.py::fixed\nPASSED a.py::kept\nFAILED a.py::broken\n"


def sample(**metadata: Any) -> RewardInput:
    return RewardInput("?", "", metadata={"test_log": LOG} | metadata)


@pytest.mark.parametrize(
    ("fail_to_pass", "pass_to_pass", "expected"),
    [
        (["a.py::fixed"], ["a.py::kept"], (1.0, 1.0, 1.0)),
        (["a.py::fixed"], [], (1.0, 1.0, 1.0)),
        (["a.py::fixed", "a.py::missing"], ["a.py::kept"], (0.0, 0.5, 1.0)),
        (["a.py::fixed"], ["a.py::kept", "a.py::broken"], (0.0, 1.0, 0.5)),
    ],
    ids=["resolved", "nothing to keep", "a test that was not run", "one was broken"],
)
def test_all_tests_of_both_lists_have_to_pass(
    fail_to_pass: list[str], pass_to_pass: list[str], expected: tuple[float, ...]
) -> None:
    parts = dict(zip(("score", "fail_to_pass", "pass_to_pass"), expected, strict=True))
    lists = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
    assert swe(sample(**lists)) == parts
    assert swe(sample(**{key: json.dumps(names) for key, names in lists.items()})) == parts


LISTS = {"FAIL_TO_PASS": ["a"], "PASS_TO_PASS": []}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "metadata.FAIL_TO_PASS: expected a list of names of tests, found None"),
        (LISTS | {"FAIL_TO_PASS": []}, "swe needs at least one test"),
        (LISTS | {"FAIL_TO_PASS": "[a"}, "metadata.FAIL_TO_PASS: expected a list of tests, or"),
        (LISTS | {"FAIL_TO_PASS": "[" * 100_000}, "metadata.FAIL_TO_PASS: expected a list"),
        (LISTS | {"PASS_TO_PASS": [1]}, "metadata.PASS_TO_PASS: expected a list of names"),
        (LISTS | {"log_parser": "mocha"}, "metadata.log_parser: expected one of pytest, unittest"),
        (LISTS | {"log_parser": ["go"]}, "metadata.log_parser: expected one of pytest"),
        (LISTS | {"test_log": None}, "the verifier of rollout.environment has to leave it"),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=re.escape(message)):
        swe(sample(**metadata))
