"""Is a token the same token for student and teacher?

Log-probs of tokens can be compared only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sluice.data.chat import load_tokenizer
from sluice.environment import ConfigurationError

_SHOWN = 3


def check_teacher(student: Path, teacher: Path, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigurationError unless every token of the student is the same token of the teacher.

    student, teacher: Hugging Face checkpoint directories. The teacher may know more tokens: the
    student writes none.
    """
    ours, theirs = (
        load_tokenizer(directory, trust_remote_code=trust_remote_code).get_vocab()
        for directory in (student, teacher)
    )
    if problem := difference(ours, theirs):
        raise ConfigurationError(
            f"the tokenizer of {teacher} is not that of the student, {student}: {problem}"
        )


def difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    """In words, which of the student's tokens (token -> id) are others
    to the teacher; empty: none.
    """
    others = sorted(
        (number, token) for token, number in student.items() if teacher.get(token) != number
    )
    shown = [
        f"{token!r} is {number} here and {teacher.get(token, 'unknown')} there"
        for number, token in others[:_SHOWN]
    ]
    return (
        f"{len(others)} of {len(student)} tokens differ, such as {', '.join(shown)}"
        if others
        else ""
    )
