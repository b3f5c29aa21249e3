"""Rows of preferences in TRL's forms.

They are a chosen and a rejected answer to one prompt; or, for kto, one answer with a label that
says whether it is desirable.

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
from sluice.input_checks import InputError, check_value, is_number
from sluice.input_checks import reward as check_reward

CHOSEN, REJECTED, COMPLETION, LABEL, MARGIN = (
    "chosen",
    "rejected",
    "completion",
    "label",
    "margin",
)
# Columns of a row of token ids (TRL's names).
PROMPT_IDS, CHOSEN_IDS, REJECTED_IDS = "prompt_ids", "chosen_ids", "rejected_ids"
COMPLETION_IDS = "completion_ids"
Messages = list[dict[str, Any]]
_NO_ANSWER = AnsweredRow("", None, {}, None)


@dataclass(frozen=True, slots=True)
class PairRow(PromptRow):
    """A prompt with two answers, of which the first is preferred.

    margin: how much better it is, at least; only a reward model learns it.
    """

    chosen: AnsweredRow = field(default=_NO_ANSWER)
    rejected: AnsweredRow = field(default=_NO_ANSWER)
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class JudgedRow(PromptRow):
    """A prompt with an answer that is desirable or not."""

    completion: AnsweredRow = field(default=_NO_ANSWER)
    desirable: bool = True


def named_answers(row: PromptRow) -> list[tuple[str, AnsweredRow]]:
    """Return the answers of a row with their columns; a single answer has no name."""
    if isinstance(row, PairRow):
        return [(CHOSEN, row.chosen), (REJECTED, row.rejected)]
    if isinstance(row, JudgedRow):
        return [(COMPLETION, row.completion)]
    return [("", row)] if isinstance(row, AnsweredRow) else []


def preference_of(row: PromptRow) -> float:
    """Return the margin of a pair, or 1 for a desirable answer and 0 for another one."""
    if isinstance(row, JudgedRow):
        return float(row.desirable)
    return row.margin if isinstance(row, PairRow) else 0.0


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
        return PairRow("", None, {}, None, chosen=chosen, rejected=rejected, margin=_margin(row))
    for name in (CHOSEN, REJECTED):
        _check_answer(row, name, (CHOSEN, REJECTED))
    if isinstance(row[CHOSEN], str) != isinstance(row[REJECTED], str):
        raise RowError(
            f"{REJECTED}: expected {_kind(row[CHOSEN])}, as {CHOSEN} is, found "
            f"{_kind(row[REJECTED])}"
        )
    return _from_texts(row, source) if isinstance(row[CHOSEN], str) else _from_messages(row, source)


def parse_judged(row: Row, source: PromptSource, vocabulary: int | None = None) -> JudgedRow:
    """Read a row with an answer and its label, true or false; for the parameters see `parse_pair`.

    Raises RowError.
    """
    key = source.label_key or LABEL
    label: Any = row.get(key)
    if label not in (True, False) or not isinstance(label, bool | int):
        raise RowError(
            f"{key}: expected true for a desirable answer, or false, found {shown(label)}"
        )
    # The label belongs to the answer, and is none that a reward compares it with.
    row = {name: value for name, value in row.items() if name != key}
    source = source.model_copy(update={"label_key": None})
    if row.get(COMPLETION_IDS) is not None:
        answer = _from_ids(row, source, COMPLETION_IDS, vocabulary)
        return JudgedRow("", None, {}, None, completion=answer, desirable=bool(label))
    _check_answer(row, COMPLETION, (COMPLETION, LABEL))
    plain = parse_row(row, source)
    if isinstance(row[COMPLETION], str):
        answer = _text(plain, row[COMPLETION])
    else:
        prompt = _as_messages(plain.prompt)
        answer = _conversation(row, source, COMPLETION, prompt, list(row[COMPLETION]))
    return JudgedRow(
        plain.prompt, None, plain.metadata, plain.tools, completion=answer, desirable=bool(label)
    )


def _margin(row: Row) -> float:
    value: Any = row.get(MARGIN)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not is_number(value):
        raise RowError(f"{MARGIN}: expected a number, found {shown(value)}")
    try:
        return check_reward(value, MARGIN)
    except InputError as error:
        raise RowError(str(error)) from error


def _check_answer(row: Row, name: str, columns: Sequence[str]) -> None:
    value: Any = row.get(name)
    if value is None:
        found = ", ".join(repr(str(column)) for column in list(row)[:20]) or "none"
        raise RowError(
            f"no column {name!r}; the row has {found}; expected a prompt with the columns "
            f"{' and '.join(columns)}"
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
    return _pair(plain, _margin(row), _text(plain, chosen), _text(plain, rejected))


def _text(plain: PromptRow, text: str) -> AnsweredRow:
    return AnsweredRow(plain.prompt, plain.label, plain.metadata, plain.tools, answer=text)


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
    return _pair(plain, _margin(row), *answers)


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
    # A row with given answers would have its completion behind the conversation.
    others = {key: value for key, value in row.items() if key != COMPLETION}
    key = "messages" if name == COMPLETION else name
    columns = {**others, key: [*masked, *answer]}
    return parse_answer(columns, source.model_copy(update={"prompt_key": key}))


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
            f"{REJECTED_IDS} have, or {PROMPT_IDS} and {COMPLETION_IDS}; found {shown(value)}"
        )
    return value


def _pair(plain: PromptRow, margin: float, chosen: AnsweredRow, rejected: AnsweredRow) -> PairRow:
    return PairRow(
        plain.prompt,
        plain.label,
        plain.metadata,
        plain.tools,
        chosen=chosen,
        rejected=rejected,
        margin=margin,
    )
