"""Rows of preferences: a chosen and a rejected answer to one prompt, in TRL's forms.

The answers are texts, messages or token ids. Without a column for the prompt, the prompt is what
both answers begin with. Each answer becomes a row with a given answer (`answers.py`), of which only
the answer is trained: answers of the assistant inside the prompt are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from sluice.api.groups.data import PromptSource
from sluice.data.answers import TOKEN_MASK, AnsweredRow, parse_answer
from sluice.data.files import Row
from sluice.data.messages import shown
from sluice.data.rows import PROMPT_KEYS, PromptRow, RowError, parse_row, prompt_key
from sluice.input_checks import InputError, check_value

CHOSEN, REJECTED = "chosen", "rejected"
# Columns of a row of token ids (TRL's names).
PROMPT_IDS, CHOSEN_IDS, REJECTED_IDS = "prompt_ids", "chosen_ids", "rejected_ids"
Messages = list[dict[str, Any]]
_NO_ANSWER = AnsweredRow("", None, {}, None)


@dataclass(frozen=True, slots=True)
class PairRow(PromptRow):
    """A prompt with two answers, of which the first is preferred."""

    chosen: AnsweredRow = field(default=_NO_ANSWER)
    rejected: AnsweredRow = field(default=_NO_ANSWER)


def named_answers(row: PromptRow) -> list[tuple[str, AnsweredRow]]:
    """Return the answers of a row with their columns; a single answer has no name."""
    if isinstance(row, PairRow):
        return [(CHOSEN, row.chosen), (REJECTED, row.rejected)]
    return [("", row)] if isinstance(row, AnsweredRow) else []


def parse_pair(row: Row, source: PromptSource, vocabulary: int | None = None) -> PairRow:
    """Read a row with a chosen and a rejected answer.

    Parameters
    ----------
    row
        The row.
    source
        Names of its columns.
    vocabulary
        Number of tokens of the model's embedding, which bounds token ids; None if unknown.

    Raises
    ------
    RowError
        If the row has no usable prompt or answers.

    """
    if row.get(CHOSEN_IDS) is not None:
        chosen, rejected = (
            _from_ids(row, source, name, vocabulary) for name in (CHOSEN_IDS, REJECTED_IDS)
        )
        return PairRow("", None, {}, None, chosen=chosen, rejected=rejected)
    for name in (CHOSEN, REJECTED):
        _check_answer(row, name)
    if isinstance(row[CHOSEN], str) != isinstance(row[REJECTED], str):
        raise RowError(
            f"{REJECTED}: expected {_kind(row[CHOSEN])}, as {CHOSEN} is, found "
            f"{_kind(row[REJECTED])}"
        )
    return _from_texts(row, source) if isinstance(row[CHOSEN], str) else _from_messages(row, source)


def _check_answer(row: Row, name: str) -> None:
    value: Any = row.get(name)
    if value is None:
        columns = ", ".join(repr(str(column)) for column in list(row)[:20]) or "none"
        raise RowError(
            f"no column {name!r}; the row has {columns}; expected a prompt with the columns "
            f"{CHOSEN} and {REJECTED}, texts or chat messages"
        )
    if not isinstance(value, str) and not (
        isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    ):
        raise RowError(f"{name}: expected a text or chat messages, found {shown(value)}")
    try:
        check_value(value, name, as_text=True)
    except InputError as error:
        raise RowError(str(error)) from error


def _kind(value: Any) -> str:
    return "a text" if isinstance(value, str) else "chat messages"


# --- texts


def _from_texts(row: Row, source: PromptSource) -> PairRow:
    chosen, rejected = str(row[CHOSEN]), str(row[REJECTED])
    if prompt_key(row, source) is None and source.prompt_key is None:
        prompt = _common_text(chosen, rejected)
        if not prompt:
            raise RowError(
                f"no column {' or '.join(map(repr, PROMPT_KEYS))}, and {CHOSEN} and {REJECTED} do "
                "not begin with the same text, which would be the prompt"
            )
        row = {**row, "prompt": prompt}
        chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    plain = parse_row(row, source)
    answers = [
        AnsweredRow(plain.prompt, plain.label, plain.metadata, plain.tools, answer=text)
        for text in (chosen, rejected)
    ]
    return _pair(plain, *answers)


def _common_text(chosen: str, rejected: str) -> str:
    """Return what both begin with, as TRL's `extract_prompt`.

    The answers keep at least one character, and a space before them.
    """
    shorter = min(len(chosen), len(rejected))
    both = zip(chosen, rejected, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    return chosen[: min(same, max(shorter - 1, 0))].removesuffix(" ")


# --- messages


def _from_messages(row: Row, source: PromptSource) -> PairRow:
    chosen, rejected = list(row[CHOSEN]), list(row[REJECTED])
    key = prompt_key(row, source)
    if key is None and source.prompt_key is None:
        prompt = _common_messages(chosen[:-1], rejected[:-1])
        if not prompt:
            raise RowError(
                f"no column {' or '.join(map(repr, PROMPT_KEYS))}, and {CHOSEN} and {REJECTED} do "
                "not begin with the same message, which would be the prompt"
            )
        row = {**row, "prompt": prompt}
    plain = parse_row(row, source)
    prompt = _as_messages(plain.prompt)
    answers = []
    for name, messages in ((CHOSEN, chosen), (REJECTED, rejected)):
        begins = _common_messages(prompt, messages) == prompt
        answer = messages[len(prompt) :] if begins else messages
        answers.append(_conversation(row, source, name, prompt, answer))
    return _pair(plain, *answers)


def _as_messages(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _common_messages(first: Messages, second: Messages) -> Messages:
    """Return the messages that both begin with, by role and content."""
    count = 0
    for left, right in zip(first, second, strict=False):
        if _said(left) != _said(right):
            break
        count += 1
    return first[:count]


def _said(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _conversation(
    row: Row, source: PromptSource, name: str, prompt: Messages, answer: Messages
) -> AnsweredRow:
    """Return prompt and answer as a conversation of which only the answer is trained."""
    if not answer or answer[-1].get("role") != "assistant":
        raise RowError(
            f"{name}: expected messages after the prompt, of which the last is the assistant's, "
            f"found {shown(answer)}"
        )
    masked = [
        {**message, TOKEN_MASK: 0} if message.get("role") == "assistant" else message
        for message in prompt
    ]
    columns = {**row, name: [*masked, *answer]}
    return parse_answer(columns, source.model_copy(update={"prompt_key": name}))


# --- token ids


def _from_ids(row: Row, source: PromptSource, name: str, vocabulary: int | None) -> AnsweredRow:
    prompt, answer = _ids(row, PROMPT_IDS), _ids(row, name)
    columns = {name: [*prompt, *answer], TOKEN_MASK: [0] * len(prompt) + [1] * len(answer)}
    keyed = source.model_copy(update={"prompt_key": name})
    return parse_answer(columns, keyed, vocabulary)


def _ids(row: Row, name: str) -> Sequence[int]:
    value: Any = row.get(name)
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise RowError(
            f"{name}: expected a list of token ids, as rows with {PROMPT_IDS}, {CHOSEN_IDS} and "
            f"{REJECTED_IDS} have; found {shown(value)}"
        )
    return value


def _pair(plain: PromptRow, chosen: AnsweredRow, rejected: AnsweredRow) -> PairRow:
    return PairRow(
        plain.prompt, plain.label, plain.metadata, plain.tools, chosen=chosen, rejected=rejected
    )
