"""Multiple choice: 1 if the response settles on the right letter.

`multiple_choice` requires the letter in a box, after "answer", or alone. `gpqa` is slime's more
forgiving reward: it also accepts the only capital letter that appears alone, or the text of the
right choice if no other choice's text appears.

A response settles on the last letter that it calls the answer. A response that names several
letters at once ("A or B"), or calls every choice the answer in turn, settles on none.

A row gives the right letter as its label (`B`, `(B)`), as `metadata.correct_letter`, as an index
into the choices, or as the text of one of `metadata.choices`. `metadata.valid_letters` restricts
the letters (default: as many as choices, else A to J).
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from sluice.rewards.builtin.extraction import after_thinking, boxed
from sluice.rewards.types import RewardError, RewardInput, as_text, shown

# Bounded, so that a page of blanks costs no more than it is long.
_OPENING = r"[\s:*_$]{0,8}(?:\\text\w{0,8}\{|\\boxed\{)?\s{0,4}\(?"
_LETTER = (
    r"([A-Z]\b(?!')|[a-z](?=\s{0,4}(?:$|[).:,*}\]])))"  # "the answer is a prime" names no letter
)
# Called the answer: the last one counts, for a model may correct itself.
_ANSWERED = (
    re.compile(rf"\b(?i:answer)(?:\s{{1,4}}is|\s{{0,4}}:)?{_OPENING}{_LETTER}", re.MULTILINE),
    re.compile(rf"\u7b54\u6848\s{{0,4}}(?:\u662f|\u4e3a|[:\uff1a])?{_OPENING}{_LETTER}"),
)
# Named as one of the choices: an answer only if no other choice is named this way.
_NAMED = (
    re.compile(
        rf"\b(?i:option|choice)(?:\s{{1,4}}is|\s{{0,4}}:)?{_OPENING}{_LETTER}", re.MULTILINE
    ),
    re.compile(r"\b([A-Z])\)?\s{1,4}is\s{1,4}(?:the\s{1,4})?correct\b"),
)
# After a letter, another letter of a list, as in "A or B", "A, B", "A/B", "(A) and (B)".
_BESIDE = re.compile(
    r"[\s)\]}.*$]{0,4}(?:(?:,|/|;|&|\||\+|\\,|\b(?:and|or|nor|und|oder|maybe|perhaps)\b|\u548c|\u6216|\u3001)"
    r"[\s({*$]{0,4}(?:\\text\w{0,8}\{)?\s{0,4}\(?){1,3}"
    r"(?:(?i:option|choice)\s{1,4}\(?)?([A-Z])\b(?!')|\s{1,4}([A-Z])\b(?=\s{0,4}(?:$|[).,A-Z]))"
)
_DENIAL = r" (?:not|never|neither|nor|except|but)(?: the| an?)?"
_DENIED = re.compile(r"\b(?i:not|isn't|never|neither|nor|except|but|cannot be)\s{1,4}\(?$")
_ALONE = re.compile(r"^\s*(?:\\text\w*\{)?[(*]*([A-Za-z])(?=\s*(?:$|[).:,*}\]]))")
_CAPITAL = re.compile(r"\b([A-Z])\b")


@dataclass(frozen=True, slots=True)
class Question:
    """Choices of a row.

    Attributes
    ----------
    letters
        Letters of the choices.
    letter
        The right letter; "" if the row gives only texts.
    texts
        Texts that count as the right answer.
    wrong
        Normalised texts of the other choices.

    """

    letters: str
    letter: str
    texts: tuple[str, ...]
    wrong: tuple[str, ...]


def multiple_choice(sample: RewardInput) -> float:
    question = read_question(sample, "multiple_choice")
    if not question.letter:
        raise RewardError(
            f"label: multiple_choice needs a letter of {question.letters}, got "
            f"{shown(sample.label)}"
        )
    text = after_thinking(sample.response)
    box = boxed(text)
    if box is not None:
        letter = _alone(box, question)
    else:
        letter = read_letter(text, question) or (
            "" if len(text.split("\n")) > 1 else _alone(text, question)
        )
    return float(letter == question.letter)


def gpqa(sample: RewardInput) -> float:
    question = read_question(sample, "gpqa")
    text = after_thinking(sample.response)
    box = boxed(text)
    letter = _alone(box, question) if box is not None else None
    if letter is None:
        letter = read_letter(text, question)
    if letter is None:
        letter = _only_capital(text, question)
    if letter is not None and question.letter:
        return float(letter == question.letter)
    return float(letter is None and _says_right_text(text, question))


def read_question(sample: RewardInput, reward: str) -> Question:
    """Return the choices and the right answer of a row.

    Raises RewardError without a right answer.
    """
    choices = sample.metadata.get("choices") or []
    choices = [as_text(c) for c in (choices.values() if isinstance(choices, dict) else choices)]
    valid = sample.metadata.get("valid_letters") or string.ascii_uppercase[: len(choices) or 10]
    letters = "".join(str(letter).strip().upper() for letter in valid)
    label = sample.label
    letter = str(sample.metadata.get("correct_letter") or "").strip().upper()
    text = as_text(label).strip() if isinstance(label, str | int | float) else ""
    named = {_words(choice): letters[i] for i, choice in enumerate(choices) if i < len(letters)}
    if not isinstance(label, str):  # an index, else the text of a choice that is a number
        index = int(text) if text.isdigit() and len(text) < 3 else len(letters)
        letter = letter or (letters[index] if index < len(letters) else "")
        text = text if not letter and _words(text) in named else ""
    if not letter and len(bare := text.strip("(). ").upper()) == 1 and bare in letters:
        letter, text = bare, ""
    letter = letter or named.get(_words(text), "")
    texts = [text] if len(text) > 1 else []
    if letter and letter in letters and letters.index(letter) < len(choices):
        texts.append(choices[letters.index(letter)])
    texts += [
        as_text(sample.metadata[key])
        for key in ("correct_answer", "answer_text")
        if sample.metadata.get(key)
    ]
    if not letter and not any(_words(t) for t in texts):
        raise RewardError(
            f"label: {reward} needs a letter of {letters} or a choice's text, got {shown(label)}"
        )
    rights = {_words(t) for t in texts}
    wrong = tuple(words for words in map(_words, choices) if words and words not in rights)
    return Question(letters, letter, tuple(t for t in texts if _words(t)), wrong)


def read_letter(text: str, question: Question) -> str | None:
    """Return the letter that the response calls the answer; "" if it does not settle on one.

    None if it does not call any letter the answer.
    """
    answered = _matches(_ANSWERED, text, question)
    if answered:
        every = len(question.letters) > 2 and len({letter for _, letter in answered}) == len(
            question.letters
        )
        last, letter = answered[-1]
        return "" if every or _with_others(text[last.end() :], letter, question) else letter
    named = _matches(_NAMED, text, question)
    if not named:
        return None
    several = len({letter for _, letter in named}) > 1
    last, letter = named[-1]
    return "" if several or _with_others(text[last.end() :], letter, question) else letter


def _matches(
    patterns: tuple[re.Pattern[str], ...], text: str, question: Question
) -> list[tuple[re.Match[str], str]]:
    """Matches of the patterns that name a letter of the question, in the order of the text."""
    letters = [
        (match, match[1].upper())
        for pattern in patterns
        for match in pattern.finditer(text)
        if match[1].upper() in question.letters
    ]
    return sorted(letters, key=lambda pair: pair[0].start())


def _with_others(behind: str, letter: str, question: Question) -> bool:
    """Return whether the text after a letter names another one, as in "A or B"."""
    match = _BESIDE.match(behind[:40])
    other = (match[1] or match[2]) if match else None
    return other is not None and other != letter and other in question.letters


def _alone(text: str, question: Question) -> str | None:
    """Return the letter of a short answer, perhaps with the choice's text: "B", "(B) 42".

    "" if it names several, None if it names none.
    """
    match = _ALONE.search(text)
    if not match or match[1].upper() not in question.letters:
        return None
    letter = match[1].upper()
    others = {c for c in _CAPITAL.findall(text) if c in question.letters} - {letter}
    listed = len(others) > 1 or _with_others(text[match.end() :], letter, question)
    return "" if listed else letter


def _only_capital(text: str, question: Question) -> str | None:
    """Return the one capital letter that appears alone; "" if there are several, None without any.

    A letter after "not" does not count, nor does "I" before a word.
    """
    letters = set()
    for match in _CAPITAL.finditer(text):
        pronoun = match[1] in "AI" and re.match(
            r"[ ']\s*(?!or\b|and\b)[a-z]", text[match.end() : match.end() + 8]
        )
        if match[1] in question.letters and not pronoun:
            denied = _DENIED.search(text[max(match.start() - 20, 0) : match.start()])
            letters.add("" if denied else match[1])
    letters.discard("")
    return None if not letters else letters.pop() if len(letters) == 1 else ""


def _says_right_text(text: str, question: Question) -> bool:
    """Return whether the right choice's text is in a response, and no other choice's."""
    words = f" {_words(text)} "
    rights = sorted((f" {_words(right)} " for right in question.texts), key=len, reverse=True)
    present = [right for right in rights if right in words]
    if any(re.search(rf"{_DENIAL}{right}", words) for right in present):
        return False
    for right in present:
        words = words.replace(right, " \0 ")
    return bool(present) and not any(f" {wrong} " in words for wrong in question.wrong if wrong)


def _words(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
