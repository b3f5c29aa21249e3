"""The tests of a programming task, in the forms in which data sets give them.

    {"inputs": [...], "outputs": [...]}                       APPS, TACO, prime_code: text in, out
    {"inputs": [...], "outputs": [...], "fn_name": "solve"}   the same, for a function
    {"assert_case": [...]}, {"test_list": [...]}              verl, MBPP: lines that must not raise
    {"test": "def check(f): ...", "entry_point": "solve"}     HumanEval
    [{"input": ..., "output": ..., "testtype": "stdin"}]      LiveCodeBench; functional: func_name

The label is one of them, as an object or as JSON text.
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
    """request: what goes into the sandbox. expected: what stays outside of it."""

    request: dict[str, Any]
    expected: Any = None


def cases_of(sample: RewardInput) -> list[Case]:
    """At least one test. Raises RewardError where the label is none of the forms."""
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
    """Parse JSON, with integers of any number of digits.

    Python refuses to parse more than `sys.get_int_max_str_digits()` of them, for that takes
    quadratic time; a Decimal takes linear time and equals the same integer. Raises ValueError, or
    RecursionError if it is nested too deep.
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
        return [_test(input_, wanted, name) for input_, wanted in zip(inputs, outputs, strict=True)]
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


def _test(input_: Any, wanted: Any, function: str | None) -> Case:
    if function is None:
        return Case({"input": _text(input_)}, _text(wanted))
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
    return Case(request, _value(wanted))


def _text(value: Any) -> str:
    """Standard input or output. No value is no text: tasks without input have null there."""
    lines = value if isinstance(value, list) else [value]
    return "\n".join("" if line is None else str(line) for line in lines)


def _value(wanted: Any) -> Any:
    """A result in JSON; text that is none is the result itself."""
    if not isinstance(wanted, str):
        return wanted
    try:
        return read_json(wanted)
    except (ValueError, RecursionError):
        return wanted
