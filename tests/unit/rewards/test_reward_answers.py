"""Mathematics, GSM8K and DAPO: accepted and rejected answers."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.rewards import RewardError, RewardInput
from sluice.rewards.builtin.dapo import dapo
from sluice.rewards.builtin.deepscaler import deepscaler
from sluice.rewards.builtin.extraction import after_thinking, boxed
from sluice.rewards.builtin.gsm8k import gsm8k
from sluice.rewards.builtin.math import equal, math
from sluice.rewards.builtin.math_prm800k import agree, math_prm800k


def sample(response: str, label: Any) -> RewardInput:
    return RewardInput(prompt="p", response=response, label=label)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \boxed{b} c}", r"a \boxed{b} c"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{7} and \boxed{cut off", "7"),
        (r"\boxed{cut off \boxed{7}", "7"),
        (r"\boxed{", None),
        ("boxed{7}", None),
        ("", None),
    ],
)
def test_the_last_closed_box_counts(text: str, expected: str | None) -> None:
    assert boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [(r"\boxed{" * 200_000, None), (r"\boxed{1}" * 200_000, "1")]
)
def test_a_text_of_many_boxes_is_read_in_one_pass(text: str, expected: str | None) -> None:
    assert boxed(text) == expected  # anything quadratic would run into the test's time limit


def test_thinking_ends_at_its_last_end() -> None:
    assert after_thinking("<think>a</think>b</think>c") == "c"
    assert after_thinking("no thinking") == "no thinking"


BOTH = [  # answer, label, what `math` says, what `math_prm800k` says
    (r"\frac12", "0.5", 1, 1),
    (r"\dfrac{1}{2}", "1/2", 1, 1),
    (r"\frac{2}{4}", r"\frac12", 1, 0),  # PRM800K wants fractions reduced
    (r"\frac{1}{3}", "0.333", 0, 0),
    (r"50\%", "50", 1, 1),
    (r"50\%", "0.5", 1, 0),
    (r"5\text{ cm}", "5", 1, 1),
    ("5 cm", "5", 1, 1),
    (r"\$5", "5", 1, 1),
    (r"\{1,2\}", r"\{2,1\}", 1, 0),
    ("(1,2)", "(2,1)", 0, 0),
    ("(1,2]", "(1, 2]", 1, 1),
    ("[1,2]", "(1,2)", 0, 0),
    (r"(-\infty,3)\cup(5,\infty)", r"(-\infty, 3) \cup (5, \infty)", 1, 1),
    (r"\text{Monday}", "Monday", 1, 1),
    (r"\text{even}", r"\text{odd}", 0, 0),
    (r"90^\circ", "90", 1, 1),
    ("90°", "90", 1, 0),
    ("1,234", "1234", 1, 1),
    ("1{,}234", "1234", 1, 1),
    ("12,345,678", "12345678", 1, 1),
    ("−3", "-3", 1, 0),  # a Unicode minus
    ("-0", "0", 1, 1),
    ("0", "-0.0", 1, 1),
    ("42.0", "42", 1, 1),
    ("42.1", "42", 0, 0),
    ("x=5", "5", 1, 1),
    ("x^2+2x+1", "(x+1)^2", 1, 1),
    (r"\sqrt{8}", r"2\sqrt2", 1, 1),
    (r"\log_2 8", "3", 1, 0),
    ("10!", "3628800", 1, 0),
    ("10^3", "1000", 1, 0),
    (r"2\frac{1}{2}", "2.5", 1, 1),
    ("7 3/4", "31/4", 1, 1),
    ("3.14", r"\pi", 0, 0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1, 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", 0, 0),
    ("3+4i", "4i+3", 1, 1),
    ("1/0", "5", 0, 0),
    ("A", "B", 0, 0),
    ("6", "5", 0, 0),
    ("", "5", 0, 0),
    ("5", r"\boxed{5}", 1, 1),
    ("__import__('os').abort()", "5", 0, 0),
]


@pytest.mark.parametrize(("answer", "label", "verified", "spelled"), BOTH)
def test_mathematics(answer: str, label: str, verified: int, spelled: int) -> None:
    response = sample(rf"Thus the answer is $\boxed{{{answer}}}$.", label)
    assert (math(response), math_prm800k(response)) == (verified, spelled)


@pytest.mark.parametrize("reward", [math, math_prm800k], ids=["math", "math_prm800k"])
def test_without_a_box_there_is_no_answer(reward: Any) -> None:
    assert reward(sample("the answer is 5", "5")) == 0.0
    assert reward(sample(r"the answer is \boxed{5}", 5)) == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"<think>\boxed{4}</think> It is \boxed{5}.", 1),
        (r"###Response It is \boxed{5}.", 1),
        (r"It is \boxed{5}.", 0),
        (r"<think>\boxed{5}</think> It is 5.", 0),
        (r"<think>\boxed{5}</think> It is \boxed{6}.", 0),
    ],
)
def test_deepscaler_requires_an_end_of_thinking(response: str, expected: int) -> None:
    assert deepscaler(sample(response, "5")) == expected


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("thus\nAnswer: 34", "34", True),
        ("Answer: $34$", "34", True),
        ("answer: \\boxed{34}", "34", True),
        ("Answer: 1,234", "1234", True),
        ("Answer: x = 34", "34", True),
        ("Answer: 34 degrees", 34, True),
        ("Answer: 34", "34.0", True),
        ("Answer: 33\nAnswer: 34", "34", True),
        ("Answer: 34\nAnswer: 33", "34", False),
        ("Answer: 034", "34", False),
        ("34", "34", False),
        ("Answer: 34" + " x" * 200, "34", False),  # further back than 300 characters
        ("Answer:", "34", False),
        (r"so \boxed{34}", "34", True),  # no answer is announced (verl)
        (r"Answer: 33, that is \boxed{34}", "34", False),
        (r"\boxed{34}" + " x" * 200, "34", False),
        ("Answer: 34<|eot_id|>", "34", True),
        (r"Answer: $\frac{1}{2}$", r"\frac{1}{2}", True),
        (r"Answer: \frac12", r"\frac{1}{2}", True),
        ("Answer: 0.5", "0.5", True),
        ("Answer: 3", "3.5", False),
    ],
    ids=str,
)
def test_dapo_reads_the_last_answer_line(response: str, label: Any, right: bool) -> None:
    assert dapo(sample(response, label)) == {"score": 1.0 if right else -1.0, "acc": float(right)}


def test_dapo_requires_a_label() -> None:
    with pytest.raises(RewardError, match="label: dapo needs an answer, the row has ' '"):
        dapo(sample("Answer: 3", " "))


@pytest.mark.parametrize(
    ("response", "label", "strict", "flexible"),
    [
        ("so\n#### 72", "72", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### 1,234", "1,234", 1, 1),
        ("#### -3", "-3", 1, 1),
        ("#### 72.00", "72", 1, 1),
        ("#### 72.", "72", 1, 1),
        ("#### 71\n#### 72", "72", 1, 1),
        ("it is 72.", "72", 0, 1),
        ("it is $72", "72", 0, 1),
        ("it is 71", "72", 0, 0),
        ("####72", "72", 0, 1),
        ("no number . at all", "72", 0, 0),
        ("#### 72" + " x" * 200, "72", 0, 0),
        ("#### 5", "reasoning\n#### 5", 1, 1),
    ],
)
def test_gsm8k_strict_and_flexible(response: str, label: str, strict: int, flexible: int) -> None:
    assert gsm8k(sample(response, label)) == {"score": strict, "flexible": flexible}


HOSTILE = {
    "tower": "9^{9^{9^{9}}}",
    "power": "10^{10000000}",
    "factorials": "((100!)!)!",
    "binomial": r"\binom{1000000}{500000}",
    "brackets": "(" * 2400 + "1" + ")" * 2400,
    "fractions": r"\frac{1}{" * 600 + "2" + "}" * 600,
    "sets": r"\{" * 1000 + "1" + r"\}" * 1000,
    "list": "1," * 2400,
    "chain": "1=" * 2400 + "1",
    "open text": r"\text{" * 800,
    "digits": "1" * 4999,
    "exponent": "1e999999999",
    "words": "a b " * 1200,
    "surrogate": "\ud83d",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("label", ["3", r"\sqrt{x}+1"])
def test_a_hostile_answer_is_wrong_and_costs_little(answer: str, label: str) -> None:
    # A step that is not linear would run into the test's time limit.
    assert not equal(answer, label)
    assert not agree(answer, label)
