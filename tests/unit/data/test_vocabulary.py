"""Tokenizers teach each other only where their vocabularies agree."""

from __future__ import annotations

import pytest

from sluice.data.vocabulary import difference

STUDENT = {"<pad>": 0, "a": 1, "b": 2, "<think>": 3}


@pytest.mark.parametrize(
    ("teacher", "problem"),
    [
        (STUDENT, ""),
        (STUDENT | {"<tool>": 4}, ""),
        (
            {"<pad>": 0, "a": 1, "b": 2},
            "1 of 4 tokens differ, such as '<think>' is 3 here and unknown there",
        ),
        (
            STUDENT | {"a": 2, "b": 1},
            "2 of 4 tokens differ, such as 'a' is 1 here and 2 there, 'b' is 2 here and 1",
        ),
        ({}, "4 of 4 tokens differ, such as '<pad>' is 0 here and unknown there"),
    ],
    ids=["the same", "one token more", "one token less", "two exchanged", "none"],
)
def test_every_token_of_the_student_must_be_the_teachers(
    teacher: dict[str, int], problem: str
) -> None:
    complaint = difference(STUDENT, teacher)
    assert complaint.startswith(problem)
    assert bool(complaint) == bool(problem)
