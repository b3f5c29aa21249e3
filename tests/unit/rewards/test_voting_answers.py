"""Answers as numbers: equal answers have equal numbers."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.rewards import registry
from sluice.rewards.types import answer_number, read_value
from sluice.rewards.voting_answers import READERS, with_answer


@pytest.mark.parametrize(
    ("name", "first", "second", "silent"),
    [
        ("math", r"so \boxed{\frac12}", r"\boxed{ \frac{1}{2} }", "one half"),
        ("math_prm800k", r"\boxed{3}", r"it is \boxed{3}", "3"),
        ("deepscaler", r"hm</think>\boxed{3}", r"\boxed{4}</think>\boxed{3}", "3"),
        ("dapo", "Answer: 1,234", "hm\nAnswer: $1234$", "1234"),
        ("gsm8k", "#### 1,234", "so\n#### 1234.00", "1234"),
    ],
)
def test_equal_answers_have_equal_numbers(name: str, first: str, second: str, silent: str) -> None:
    parts = [with_answer((0.0, {}), name, text)[1] for text in (first, second)]
    assert parts[0] == parts[1]
    assert set(parts[0]) == {"pred"}
    assert with_answer((0.5, {"acc": 1.0}), name, silent) == (0.5, {"acc": 1.0})


def test_readers_belong_to_existing_rewards() -> None:
    assert set(READERS) <= set(registry.names())
    assert with_answer((1.0, {}), "f1", "an answer") == (1.0, {})


@pytest.mark.parametrize(
    ("pred", "number"),
    [("34", answer_number("34")), (7, 7.0), (None, None), ([1], None)],
    ids=["text", "number", "none", "list"],
)
def test_a_function_may_say_what_it_has_read(pred: Any, number: float | None) -> None:
    assert read_value({"score": 1.0, "pred": pred}, None)[1].get("pred") == number


def test_numbers_of_answers_are_exact() -> None:
    assert answer_number("34") == int(answer_number("34")) != answer_number("35")
