"""IFBench's instructions (Pyatkin et al. 2025) about counts and ratios, by id."""

from __future__ import annotations

import re
from collections import Counter

from sluice.rewards.builtin.ifbench import text as t
from sluice.rewards.builtin.ifbench.function_words import FUNCTION_WORDS
from sluice.rewards.builtin.ifbench.ifeval import InstructionCheck

_CONJUNCTIONS = frozenset(["and", "but", "for", "nor", "or", "so", "yet"])
_PRONOUNS = frozenset(
    (
        "i",
        "me",
        "we",
        "us",
        "you",
        "he",
        "him",
        "she",
        "her",
        "it",
        "they",
        "them",
        "my",
        "mine",
        "our",
        "ours",
        "your",
        "yours",
        "his",
        "hers",
        "its",
        "their",
        "theirs",
        "myself",
        "ourselves",
        "yourself",
        "yourselves",
        "himself",
        "herself",
        "itself",
        "themselves",
        "this",
        "that",
        "these",
        "those",
        "who",
        "whom",
        "whose",
        "which",
        "what",
        "whoever",
        "whomever",
        "whatever",
        "whichever",
        "anybody",
        "anyone",
        "anything",
        "everybody",
        "everyone",
        "everything",
        "nobody",
        "nothing",
        "somebody",
        "someone",
        "something",
        "each",
        "either",
        "neither",
        "both",
        "all",
        "some",
        "any",
        "none",
    )
)
_NAMES = (
    "Emma",
    "Liam",
    "Sophia",
    "Jackson",
    "Olivia",
    "Noah",
    "Ava",
    "Lucas",
    "Isabella",
    "Mason",
    "Mia",
    "Ethan",
    "Charlotte",
    "Alexander",
    "Amelia",
    "Benjamin",
    "Harper",
    "Leo",
    "Zoe",
    "Daniel",
    "Chloe",
    "Samuel",
    "Lily",
    "Matthew",
    "Grace",
    "Owen",
    "Abigail",
    "Gabriel",
    "Ella",
    "Jacob",
    "Scarlett",
    "Nathan",
    "Victoria",
    "Elijah",
    "Layla",
    "Nicholas",
    "Audrey",
    "David",
    "Hannah",
    "Christopher",
    "Penelope",
    "Thomas",
    "Nora",
    "Andrew",
    "Aria",
    "Joseph",
    "Claire",
    "Ryan",
    "Stella",
    "Jonathan",
)
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")


def _word_range(text: str, *, min_words: int, max_words: int) -> bool:
    return min_words <= len(t.words(text)) <= max_words


def _unique_words(text: str, *, N: int) -> bool:  # noqa: N803  (the data set's name)
    return len({word.strip(t.PUNCTUATION) for word in text.lower().split()}) >= N


def _conjunctions(text: str, *, small_n: int) -> bool:
    return (
        len(_CONJUNCTIONS & {word.strip(t.PUNCTUATION) for word in text.lower().split()}) >= small_n
    )


def _person_names(text: str, *, N: int) -> bool:  # noqa: N803
    return sum(bool(re.search(rf"\b{name}\b", text)) for name in _NAMES) >= N


def _numbers(text: str, *, N: int) -> bool:  # noqa: N803
    return len(re.findall(r"\d+", t.without_punctuation(text))) == N


def _pronouns(text: str, *, N: int) -> bool:  # noqa: N803
    return sum(word in _PRONOUNS for word in t.words(text.lower())) >= N


def _punctuation(text: str) -> bool:
    rest = re.sub(r"\?!|!\?|‽", "", text, count=1)
    return rest != text and all(mark in rest for mark in ".,!?;:")


def _japanese(text: str, *, N: int) -> bool:  # noqa: N803
    every = [word.strip(t.PUNCTUATION) for word in text.split()][int(N) - 1 :: int(N)]
    return all(_JAPANESE.search(word) for word in every if word and not word.isdigit())


def _keywords_multiple(text: str, **keywords: str) -> bool:
    return all(
        t.times(keywords[f"keyword{i}"].strip(), text) == n
        for i, n in enumerate((1, 2, 3, 5, 7), start=1)
    )


def _ratio(text: str) -> bool:
    endings = Counter(sentence[-1] for sentence in t.sentences(text))
    return endings["."] == 2 * endings["?"]


def _balance(text: str) -> bool:
    endings = Counter(sentence[-1] for sentence in t.sentences(text))
    return endings["."] == endings["?"] == endings["!"]


def _same_length(text: str) -> bool:
    sentences, words = t.sentences(text), t.bare_words(text.lower())
    return (
        len(sentences) == 3
        and len({len(s) for s in sentences}) == 1
        and len(set(words)) == len(words)
    )


def _stop_words(text: str, *, percentage: float) -> bool:
    words = t.words(text.lower())
    return (
        bool(words)
        and 100 * sum(word in FUNCTION_WORDS for word in words) / len(words) <= percentage
    )


def _overlap(text: str, *, reference_text: str, percentage: float) -> bool:
    """Compare the share of the text's trigrams that the reference has, within 2 per cent."""
    trigrams, expected = _trigrams(text), _trigrams(reference_text)
    return bool(trigrams) and abs(100 * len(trigrams & expected) / len(trigrams) - percentage) <= 2


def _trigrams(text: str) -> set[tuple[str, ...]]:
    marks = re.findall(r"\w+|[^\w\s]", text)
    return set(zip(marks, marks[1:], marks[2:], strict=False))


CHECKS: dict[str, InstructionCheck] = {
    "count:conjunctions": _conjunctions,
    "count:keywords_multiple": _keywords_multiple,
    "count:numbers": _numbers,
    "count:person_names": _person_names,
    "count:pronouns": _pronouns,
    "count:punctuation": _punctuation,
    "count:unique_word_count": _unique_words,
    "count:word_count_range": _word_range,
    "count:words_japanese": _japanese,
    "ratio:overlap": _overlap,
    "ratio:sentence_balance": _balance,
    "ratio:sentence_type": _ratio,
    "ratio:sentence_words": _same_length,
    "ratio:stop_words": _stop_words,
}
