"""Multiple choice: 1 where the letter that the response settles on is the right one.

`multiple_choice` wants the letter said: in a box, after "answer", or alone. `gpqa` is slime's
more forgiving reward: it also takes the last capital letter that stands alone, or the text of
the right choice.

A row gives the right letter as its label (`B`, `(B)`), as `metadata.correct_letter`, as an index
into the choices, or as the text of one of `metadata.choices`; `metadata.valid_letters` restricts
the letters (default: one for each choice, else A to J).
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from sluice.rewards.builtin.extraction import after_thinking, boxed
from sluice.rewards.types import RewardError, RewardInput, shown

# Bounded, so that a page of blanks costs no more than it is long.
_OPENING = r"[\s:*_$]{0,8}(?:\\text\w{0,8}\{|\\boxed\{)?\s{0,4}\(?"
_LETTER = (
    r"([A-Z]\b(?!')|[a-z](?=\s{0,4}(?:$|[).:,*}\]])))"  # "the answer is a prime" names no letter
)
_SAID = (
    re.compile(
        rf"\b(?i:answer|option|choice)(?:\s{{1,4}}is|\s{{0,4}}:)?{_OPENING}{_LETTER}", re.MULTILINE
    ),
    re.compile(rf"\u7b54\u6848\s{{0,4}}(?:\u662f|\u4e3a|[:\uff1a])?{_OPENING}{_LETTER}"),
    re.compile(r"\b([A-Z])\)?\s{1,4}is\s{1,4}(?:the\s{1,4})?correct\b"),
)
_ALONE = re.compile(r"^\s*(?:\\text\w*\{)?[(*]*([A-Za-z])(?=\s*(?:$|[).:,*}\]]))")
_CAPITAL = re.compile(r"\b([A-Z])\b")


@dataclass(frozen=True, slots=True)
class Question:
    """letter: the right one, "" where the row gives only texts. texts: what counts as the right
    answer in words.
    """

    letters: str
    letter: str
    texts: tuple[str, ...]


def multiple_choice(sample: RewardInput) -> float:
    question = read_question(sample, "multiple_choice")
    if not question.letter:
        raise RewardError(
            f"label: multiple_choice needs a letter of {question.letters}, got "
            f"{shown(sample.label)}"
        )
    text = after_thinking(sample.response)
    box = boxed(text)
    letter = (
        _first(_ALONE, box, question)
        if box is not None
        else said(text, question) or _alone(text, question)
    )
    return float(letter == question.letter)


def gpqa(sample: RewardInput) -> float:
    question = read_question(sample, "gpqa")
    text = after_thinking(sample.response)
    box = boxed(text)
    letter = _first(_ALONE, box, question) if box is not None else None
    letter = letter or said(text, question) or _last_capital(text, question)
    if letter and question.letter:
        return float(letter == question.letter)
    words = f" {_words(text)} "
    return float(any(f" {_words(right)} " in words for right in question.texts))


def read_question(sample: RewardInput, reward: str) -> Question:
    """The right answer of a row. Raises RewardError where it gives none."""
    choices = sample.metadata.get("choices") or []
    choices = [str(c) for c in (choices.values() if isinstance(choices, dict) else choices)]
    valid = sample.metadata.get("valid_letters") or string.ascii_uppercase[: len(choices) or 10]
    letters = "".join(str(letter).strip().upper() for letter in valid)
    label = sample.label
    letter = str(sample.metadata.get("correct_letter") or "").strip().upper()
    if not letter and isinstance(label, int) and 0 <= label < len(letters):
        letter = letters[label]
    text = str(label).strip() if isinstance(label, str) else ""
    if not letter and len(bare := text.strip("(). ").upper()) == 1 and bare in letters:
        letter, text = bare, ""
    named = {_words(choice): letters[i] for i, choice in enumerate(choices) if i < len(letters)}
    letter = letter or named.get(_words(text), "")
    texts = [text] if len(text) > 1 else []
    if letter and letter in letters and letters.index(letter) < len(choices):
        texts.append(choices[letters.index(letter)])
    texts += [
        str(sample.metadata[key])
        for key in ("correct_answer", "answer_text")
        if sample.metadata.get(key)
    ]
    if not letter and not any(_words(t) for t in texts):
        raise RewardError(
            f"label: {reward} needs a letter of {letters} or a choice's text, got {shown(label)}"
        )
    return Question(letters, letter, tuple(t for t in texts if _words(t)))


def said(text: str, question: Question) -> str | None:
    """The letter that comes last after a word such as "answer"."""
    matches = [(m.start(), m[1].upper()) for pattern in _SAID for m in pattern.finditer(text)]
    return max(
        ((at, letter) for at, letter in matches if letter in question.letters), default=(0, None)
    )[1]


def _alone(text: str, question: Question) -> str | None:
    """A response of one letter, perhaps with the choice's text behind it: "B", "(B) 42"."""
    return _first(_ALONE, text, question) if len(text.split("\n")) == 1 else None


def _first(pattern: re.Pattern[str], text: str, question: Question) -> str | None:
    match = pattern.search(text)
    return match[1].upper() if match and match[1].upper() in question.letters else None


def _last_capital(text: str, question: Question) -> str | None:
    return next(
        (letter for letter in reversed(_CAPITAL.findall(text)) if letter in question.letters), None
    )


def _words(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
