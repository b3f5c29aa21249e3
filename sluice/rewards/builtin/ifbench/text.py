"""Split English text into words, sentences and paragraphs, without language models."""

from __future__ import annotations

import re
import string

from sluice.rewards.builtin.ifbench.function_words import FUNCTION_WORDS

PUNCTUATION = string.punctuation + " "
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+(?:['’-]\w+)*")
# Abbreviations that never end a sentence.
_BEFORE_MORE = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|e\.g|i\.e|cf)\.$", re.IGNORECASE)
_BEFORE_NUMBER = re.compile(r"\b(?:No|Nos|Fig|Vol|p|pp)\.$", re.IGNORECASE)
# Abbreviations that may end a sentence, and initials.
_ABBREVIATION = re.compile(r"\b(?:Jr|Sr|Inc|Ltd|Co|etc|U\.S|a\.m|p\.m|[A-Za-z])\.$", re.IGNORECASE)
_CAPITALISED = re.compile(r"[A-Z]\w*\b(?!\.)")
# Number of characters after a mark that are inspected.
_AHEAD = 40
_END = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)|\n{2,}")


def words(text: str) -> list[str]:
    """Return runs of letters, digits and underscores."""
    return _WORD.findall(text)


def tokens(text: str) -> list[str]:
    """Return words as people count them: "don't" is one."""
    return _TOKEN.findall(text)


def bare_words(text: str) -> list[str]:
    """Return the words that whitespace separates, without punctuation."""
    return without_punctuation(text).split()


def without_punctuation(text: str) -> str:
    return text.translate(_NO_PUNCTUATION)


def sentences(text: str) -> list[str]:
    """Split at . ! ? (with closing quotes) and empty lines, not after abbreviations and initials.

    The rules follow the decisions of Punkt (Kiss and Strunk 2006; nltk, which IFEval uses) without
    its statistics: a sentence may begin in lower case, but not after an ellipsis.
    """
    pieces, start = [], 0
    for match in _END.finditer(text):
        piece = text[start : match.end()]
        more = text[match.end() : match.end() + _AHEAD].lstrip()
        if more and not _ends(match[0], piece[-12:], more):
            continue
        pieces.append(piece.strip())
        start = match.end()
    pieces.append(text[start:].strip())
    return [sentence for sentence in pieces if sentence]


def _ends(mark: str, piece: str, more: str) -> bool:
    """Return whether the mark at the end of a piece ends a sentence.

    `more` is the text after it.
    """
    if mark.strip("."):
        return True
    if len(mark) > 1:
        return not more[0].islower()
    if _BEFORE_MORE.search(piece) or (_BEFORE_NUMBER.search(piece) and more[0].isdigit()):
        return False
    if not _ABBREVIATION.search(piece):
        return True
    # Names are always capitalised, function words only at the start of a sentence.
    word = _CAPITALISED.match(more)
    return word is not None and word[0].lower() in FUNCTION_WORDS


def lines(text: str) -> list[str]:
    """Return the lines that are not blank."""
    return [line for line in text.split("\n") if line.strip()]


def times(pattern: str, text: str) -> int:
    """Count a whole word or phrase, ignoring case."""
    return len(re.findall(rf"\b{re.escape(pattern)}\b", text, re.IGNORECASE))
