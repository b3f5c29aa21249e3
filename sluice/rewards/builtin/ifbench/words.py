"""IFBench's instructions (Pyatkin et al. 2025) about words and sentences, by id."""

from __future__ import annotations

import re
import string
from collections import Counter
from itertools import pairwise

from sluice.rewards.builtin.ifbench import text as t
from sluice.rewards.builtin.ifbench.ifeval import InstructionCheck

_CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
_PRIMES = frozenset(n for n in range(2, 100) if all(n % d for d in range(2, n)))


def _alphabet(text: str) -> bool:
    first = [word[0].lower() for word in t.bare_words(text)]
    letters = string.ascii_lowercase
    inside = bool(first) and all(letter in letters for letter in first)
    return inside and all(
        (letters.index(a) + 1) % 26 == letters.index(b) for a, b in pairwise(first)
    )


def _vowels(text: str) -> bool:
    return "\n" not in text.strip() and len(set(text.lower()) & set("aeiou")) <= 3


def _consonants(text: str) -> bool:
    return all(_CONSONANTS.search(word) for word in text.lower().split())


def _palindromes(text: str) -> bool:
    return sum(len(word) >= 5 and word == word[::-1] for word in t.bare_words(text.lower())) >= 10


def _prime_lengths(text: str) -> bool:
    return all(len(word) in _PRIMES for word in t.bare_words(text))


def _repeats(text: str, *, small_n: int) -> bool:
    return max(Counter(t.bare_words(text.lower())).values(), default=0) <= small_n


def _no_consecutive(text: str) -> bool:
    return all(a[0] != b[0] for a, b in pairwise(t.bare_words(text.lower())))


def _last_first(text: str) -> bool:
    parts = [t.tokens(sentence.lower()) for sentence in t.sentences(text)]
    return all(a and b and a[-1] == b[0] for a, b in pairwise(parts))


def _paragraph_last_first(text: str) -> bool:
    parts = [t.tokens(line.lower()) for line in text.split("\n")]
    return all(words[0] == words[-1] for words in parts if words)


def _keyword_position(text: str, *, keyword: str, n: int, m: int) -> bool:
    sentences = t.sentences(text)
    words = t.tokens(sentences[n - 1]) if n <= len(sentences) else []
    return m <= len(words) and words[m - 1].lower() == keyword.strip().lower()


def _words_position(text: str, *, keyword: str) -> bool:
    words = [word.lower() for word in t.tokens(text)]
    return len(words) > 1 and words[1] == words[-2] == keyword.strip().lower()


def _alliteration(text: str) -> bool:
    previous = -1
    for sentence in t.sentences(text):
        first = [word[0] for raw in sentence.lower().split() if (word := raw.lstrip(t.PUNCTUATION))]
        same = [a == b for a, b in pairwise(first)]
        runs = sum(now and not before for before, now in pairwise([False, *same]))
        length = sum(same) + runs
        if length <= previous:
            return False
        previous = length
    return True


def _keyword_sentence(text: str, *, word: str, N: int) -> bool:  # noqa: N803
    sentences = t.sentences(text)
    return int(N) <= len(sentences) and t.times(word, sentences[int(N) - 1]) > 0


def _increment(text: str, *, small_n: int) -> bool:
    counts = [len(t.bare_words(sentence)) for sentence in t.sentences(text)]
    return bool(counts) and all(b == a + small_n for a, b in pairwise(counts))


CHECKS: dict[str, InstructionCheck] = {
    "sentence:alliteration_increment": _alliteration,
    "sentence:increment": _increment,
    "sentence:keyword": _keyword_sentence,
    "words:alphabet": _alphabet,
    "words:consonants": _consonants,
    "words:keywords_specific_position": _keyword_position,
    "words:last_first": _last_first,
    "words:no_consecutive": _no_consecutive,
    "words:palindrome": _palindromes,
    "words:paragraph_last_first": _paragraph_last_first,
    "words:prime_lengths": _prime_lengths,
    "words:repeats": _repeats,
    "words:vowel": _vowels,
    "words:words_position": _words_position,
}
