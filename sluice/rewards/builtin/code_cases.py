"""Test cases of a programming task, in the formats of common data sets.

    {"inputs": [...], "outputs": [...]}                       APPS, TACO, prime_code: text in, out
    {"inputs": [...], "outputs": [...], "fn_name": "solve"}   the same, for a function
    {"assert_case": [...]}, {"test_list": [...]}              verl, MBPP: lines that must not raise
    {"test": "def check(f): ...", "entry_point": "solve"}     HumanEval
    [{"input": ..., "output": ..., "testtype": "stdin"}]      LiveCodeBench; functional: func_name

The label has one of these formats, as an object or as JSON text.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sluice.rewards.types import RewardError, RewardInput, shown


@dataclass(frozen=True, slots=True)
class Case:
    """A test: the request to the sandbox, and the expected result, which stays outside."""

    request: dict[str, Any]
    expected: Any = None


def cases_of(sample: RewardInput) -> list[Case]:
    """Return at least one test. Raises RewardError if the label has none of the formats."""
    label = sample.label
    if isinstance(label, str):
        try:
            label = read_json(label)
        except (ValueError, RecursionError):
            raise RewardError(
                f"label: code needs tests as JSON, got {shown(sample.label)}"
            ) from None
    tests = (
        _from_list(label, sample)
        if isinstance(label, list)
        else _from_object(label)
        if isinstance(label, dict)
        else []
    )
    if not tests:
        raise RewardError(
            "label: code needs {inputs, outputs[, fn_name]}, {assert_case}, {test_list}, {test, "
            "entry_point} or "
            f"[{{input, output}}] with at least one test, got {shown(sample.label)}"
        )
    return tests


def read_json(text: str) -> Any:
    """Parse JSON with integers of any length.

    Python refuses more than `sys.get_int_max_str_digits()` digits, because parsing them takes
    quadratic time. A Decimal takes linear time and equals the same integer. Raises ValueError, or
    RecursionError if the text is nested too deeply.
    """
    limit = sys.get_int_max_str_digits() or len(text)
    return json.loads(
        text, parse_int=lambda digits: int(digits) if len(digits) < limit else Decimal(digits)
    )


def _from_object(label: dict[str, Any]) -> list[Case]:
    if "inputs" in label:
        inputs, outputs, name = label["inputs"], label.get("outputs"), label.get("fn_name")
        if (
            not isinstance(inputs, list)
            or not isinstance(outputs, list)
            or len(inputs) != len(outputs)
        ):
            raise RewardError("label: inputs and outputs of code must be lists of the same length")
        return [_test(input_, output, name) for input_, output in zip(inputs, outputs, strict=True)]
    if "test" in label and "entry_point" in label:
        return [Case({"check": f"{label['test']}\ncheck({label['entry_point']})\n"})]
    setup = str(label.get("test_setup_code") or "")
    lines = label.get("assert_case") or label.get("test_list") or []
    return [
        Case({"check": f"{setup}\n{line}\n"})
        for line in ([lines] if isinstance(lines, str) else lines)
    ]


def _from_list(label: list[Any], sample: RewardInput) -> list[Case]:
    if not all(isinstance(test, dict) and "input" in test and "output" in test for test in label):
        return []
    tests = []
    for test in label:
        details = test.get("metadata") if isinstance(test.get("metadata"), dict) else {}
        name = details.get("func_name") or sample.metadata.get("func_name")
        functional = test.get("testtype") == "functional"
        if functional and not name:
            raise RewardError(
                "label: a functional test needs func_name in its metadata or in the row's"
            )
        tests.append(_test(test["input"], test["output"], name if functional else None))
    return tests


def _test(input_: Any, output: Any, function: str | None) -> Case:
    if function is None:
        return Case({"input": _text(input_)}, _text(output))
    try:
        arguments = (
            [json.loads(line) for line in input_.split("\n") if line.strip()]
            if isinstance(input_, str)
            else input_
        )
    except ValueError:
        raise RewardError(
            f"label: inputs of {function} must be JSON, one argument a line, got {shown(input_)}"
        ) from None
    if not isinstance(arguments, list):
        raise RewardError(
            f"label: inputs of {function} must be a list of arguments, got {shown(input_)}"
        )
    try:
        request = {"call": function, "arguments": json.dumps(arguments)}
    except (TypeError, ValueError):
        raise RewardError(
            f"label: inputs of {function} must be JSON with integers of at most "
            f"{sys.get_int_max_str_digits()} digits, got {shown(input_)}"
        ) from None
    return Case(request, _value(output))


def _text(value: Any) -> str:
    """Return standard input or output as text. Null, as in tasks without input, is empty."""
    lines = value if isinstance(value, list) else [value]
    return "\n".join("" if line is None else str(line) for line in lines)


def _value(output: Any) -> Any:
    """Parse a result as JSON; other text is the result itself."""
    if not isinstance(output, str):
        return output
    try:
        return read_json(output)
    except (ValueError, RecursionError):
        return output
