"""Multiple choice: the letter a response settles on, and the ways a row gives the right one."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.rewards import RewardError, RewardInput
from sluice.rewards.builtin.multiple_choice import gpqa, multiple_choice

CHOICES = ["red cat", "blue cat", "green cat", "white cat"]


def sample(response: str, label: Any = "B", **metadata: Any) -> RewardInput:
    return RewardInput(prompt="p", response=response, label=label, metadata=metadata)


@pytest.mark.parametrize(
    ("response", "strict", "forgiving"),
    [
        ("B", 1, 1),
        ("(B) blue cat", 1, 1),
        ("The answer is B.", 1, 1),
        ("The answer is **B**", 1, 1),
        (r"The answer is $\boxed{B}$", 1, 1),
        (r"\boxed{\text{B}}", 1, 1),
        (r"\boxed{B) blue cat}", 1, 1),
        ("answer: (b)", 1, 1),
        ("Option B", 1, 1),
        ("B is the correct one", 1, 1),
        ("\u7b54\u6848: B", 1, 1),  # "answer" in Chinese
        ("\u7b54\u6848\uff1aB\u3002", 1, 1),
        ("\u7b54\u6848\u662f B", 1, 1),
        ("\u7b54\u6848: C", 0, 0),
        ("The answer is A. No: the answer is B.", 1, 1),
        ("<think>The answer is A.</think> Answer: B", 1, 1),
        ("I would take B", 0, 1),
        ("It must be the blue cat", 0, 1),
        ("The answer is a blue cat", 0, 1),
        ("The answer is C", 0, 0),
        (r"The answer is B, that is \boxed{C}", 0, 0),
        ("A dog is no cat", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_letter_a_response_settles_on(response: str, strict: int, forgiving: int) -> None:
    judged = sample(response, choices=CHOICES)
    assert (multiple_choice(judged), gpqa(judged)) == (strict, forgiving)


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("B", {}),
        ("(b)", {}),
        (1, {}),
        ("Blue cat", {"choices": CHOICES}),
        ("x", {"correct_letter": "b"}),
        ("B", {"choices": {"A": "red", "B": "blue"}}),
        ("B", {"valid_letters": ["A", "B"]}),
    ],
    ids=str,
)
def test_a_row_may_give_the_letter_in_several_ways(label: Any, metadata: dict[str, Any]) -> None:
    for reward in (multiple_choice, gpqa):
        assert reward(sample("Answer: B", label, **metadata)) == 1.0
        assert reward(sample("Answer: A", label, **metadata)) == 0.0


def test_a_letter_outside_of_the_choices_is_no_answer() -> None:
    assert multiple_choice(sample("Answer: E", "E", valid_letters=["A", "E"])) == 1.0
    assert multiple_choice(sample("Answer: E. Answer: Z", "E", valid_letters=["A", "E"])) == 1.0


@pytest.mark.parametrize("reward", [multiple_choice, gpqa], ids=["multiple_choice", "gpqa"])
@pytest.mark.parametrize("label", [None, "", 12, "..."])
def test_a_row_without_a_right_answer_is_refused(reward: Any, label: Any) -> None:
    with pytest.raises(RewardError, match=r"^label: "):
        reward(sample("Answer: B", label))


def test_pages_of_blanks_are_read_in_one_pass() -> None:
    text = ("answer" + " " * 2000) * 500
    assert (
        gpqa(sample(text)) == multiple_choice(sample(text)) == 0.0
    )  # anything else would run into the time limit
