"""Tests of programming tasks in the formats of data sets, and comparison of outputs."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from sluice.rewards import RewardError, RewardInput
from sluice.rewards.builtin.code import _passes, _program, same_output, same_value
from sluice.rewards.builtin.code_cases import Case, cases_of
from sluice.rewards.sandbox import Isolation, ProgramRun


def sample(label: Any, **metadata: Any) -> RewardInput:
    return RewardInput(prompt="p", response="r", label=label, metadata=metadata)


CHECK = "def check(f): assert f(1) == 2"


@pytest.mark.parametrize(
    ("label", "metadata", "tests"),
    [
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, {}, [Case({"input": "1\n"}, "2\n")]),
        ({"inputs": [None], "outputs": ["2"]}, {}, [Case({"input": ""}, "2")]),
        ([{"input": None, "output": None}], {}, [Case({"input": ""}, "")]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, {}, [Case({"input": "1\n2"}, "3")]),
        (
            {"inputs": ["1\n[2]"], "outputs": ["[3]"], "fn_name": "f"},
            {},
            [Case({"call": "f", "arguments": "[1, [2]]"}, [3])],
        ),
        (
            {"inputs": [[1, "a"]], "outputs": ["b"], "fn_name": "f"},
            {},
            [Case({"call": "f", "arguments": '[1, "a"]'}, "b")],
        ),
        (
            {"assert_case": ["assert f(1)", "assert f(2)"]},
            {},
            [Case({"check": f"\nassert f({i})\n"}) for i in (1, 2)],
        ),
        (
            {"test_list": ["assert x"], "test_setup_code": "x=1"},
            {},
            [Case({"check": "x=1\nassert x\n"})],
        ),
        ({"test": CHECK, "entry_point": "f"}, {}, [Case({"check": f"{CHECK}\ncheck(f)\n"})]),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], {}, [Case({"input": "1"}, "2")]),
        (
            [
                {
                    "input": "1",
                    "output": "2",
                    "testtype": "functional",
                    "metadata": {"func_name": "f"},
                }
            ],
            {},
            [Case({"call": "f", "arguments": "[1]"}, 2)],
        ),
        (
            [{"input": "1", "output": "2", "testtype": "functional"}],
            {"func_name": "g"},
            [Case({"call": "g", "arguments": "[1]"}, 2)],
        ),
    ],
    ids=[
        "stdin",
        "no input",
        "no input, no output",
        "stdin in lines",
        "call in lines",
        "call",
        "asserts",
        "tests with set-up",
        "check",
        "stdin records",
        "functional record",
        "name in metadata",
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_forms_of_tests(
    label: Any, metadata: dict[str, Any], tests: list[Case], as_text: bool
) -> None:
    assert cases_of(sample(json.dumps(label) if as_text else label, **metadata)) == tests


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "label: code needs {inputs"),
        ("no json", "label: code needs tests as JSON, got 'no json'"),
        ({"inputs": [], "outputs": []}, "with at least one test"),
        ({"inputs": ["1"], "outputs": []}, "lists of the same length"),
        (
            {"inputs": ["x y"], "outputs": ["1"], "fn_name": "f"},
            "inputs of f must be JSON, one argument a line",
        ),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "needs func_name"),
        ([1, 2], "label: code needs {inputs"),
    ],
)
def test_a_label_without_tests_is_refused_with_the_formats(label: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        cases_of(sample(label))


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("3\n", "3", True),
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("0.3333333", "0.33333331", True),
        ("0.33", "0.34", False),
        ("3", "3.0", True),
        ("30000001", "30000002", False),
        ("a\nb", "b\na", False),
        ("1\n2", "1 2", False),
        ("", "", True),
        ("yes", "YES", False),
        ("1" * 400 + ".0", "2" * 400 + ".0", False),  # both beyond floats
        ("1" + "0" * 5000, "1" + "0" * 5000, True),
    ],
)
def test_outputs(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("ours", "expected", "same"),
    [
        ([1, 2], [1, 2], True),
        (3, [3], True),
        (True, 1, False),
        (0.1 + 0.2, 0.3, True),
        ({"a": [1]}, {"a": [1.0]}, True),
        ("1", 1, False),
        (None, None, True),
        (10**400, 1.5, False),
        (Decimal(10**400), 10**400, True),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values(ours: Any, expected: Any, same: bool) -> None:
    assert same_value(ours, expected) is same


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("text\n```python\nx = 1\n```\nand\n```python\nx = 2\n```\nthat is it", "x = 2\n"),
        ("<think>```python\nx = 1\n```</think>\n```\nx = 3\n```", "x = 3\n"),
        ("```bash\nls\n```", ""),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("print(1)", "print(1)"),
        ("```python\ncut off", ""),
        ("x\0y", ""),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", "print(1)\n"),
        ("```\nx = 1\n```\nor\n```\nx = 2\n```", "x = 2\n"),
        ("```text\n1\n```\n```bash\nls\n```", ""),
        ("1. first\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()\n"),
        ("- ```python\n  x = 1\n  ```", "x = 1\n"),
        ("\t```py\n\tx = 1\n\t```", "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("````python\n#\n```\n#\n````", "#\n```\n#\n"),
        ("<think>```python\nx = 1\n```", ""),
    ],
)
def test_the_last_python_block_is_the_program(response: str, program: str) -> None:
    assert _program(response) == program


@pytest.mark.parametrize(
    ("output", "expected", "passes"),
    [
        ("1" + "0" * 5000, "1" + "0" * 5000, True),
        ("1" + "0" * 5000, "2" + "0" * 5000, False),
        ("[" * 3000 + "]" * 3000, "[1]", False),
        ("1" + "0" * 400, "1.5", False),
        ("no json", "[1]", False),
    ],
    ids=["long integer", "other long integer", "3,000 deep", "beyond floats", "no json"],
)
def test_a_result_that_cannot_be_read_fails_its_test_and_not_the_sample(
    output: str, expected: str, passes: bool
) -> None:
    label = {"inputs": [[]], "outputs": [expected], "fn_name": "f"}
    (case,) = cases_of(sample(label))
    assert _passes(case, ProgramRun("ok", output, "")) is passes


def test_an_argument_of_too_many_digits_is_refused_with_its_function() -> None:
    label = '{"inputs": [[' + "9" * 5000 + ']], "outputs": [1], "fn_name": "f"}'
    with pytest.raises(RewardError, match="inputs of f must be JSON with integers of at most 4300"):
        cases_of(sample(label))


def test_a_missing_layer_is_named_with_its_cause_and_its_meaning() -> None:
    isolation = Isolation(
        ("landlock", "seccomp"), {"namespaces": "[Errno 1] unshare: Operation not permitted"}
    )
    assert str(isolation) == "landlock+seccomp"
    line = isolation.warning("namespaces")
    assert (
        "no layer 'namespaces' on this machine ([Errno 1] unshare: Operation not permitted): "
        "programs write" in line
    )
    assert "\n" not in line
