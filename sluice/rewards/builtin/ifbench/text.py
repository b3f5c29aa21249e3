"""How the instruction checks read a text: words, sentences, paragraphs.

English, without language models.
"""

from __future__ import annotations

import re
import string

PUNCTUATION = string.punctuation + " "
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+(?:['’-]\w+)*")
_ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Co|vs|etc|e\.g|i\.e|Fig|No|U\.S|a\.m|p\.m|[A-Z])\.$",
    re.IGNORECASE,
)
_END = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)|\n{2,}")


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores."""
    return _WORD.findall(text)


def tokens(text: str) -> list[str]:
    """Words as people count them: "don't" is one."""
    return _TOKEN.findall(text)


def bare_words(text: str) -> list[str]:
    """Words that whitespace separates, without any punctuation."""
    return without_punctuation(text).split()


def without_punctuation(text: str) -> str:
    return text.translate(_NO_PUNCTUATION)


def sentences(text: str) -> list[str]:
    """Ended by . ! ? (and closing quotes), or by an empty line; not by the dot of an abbreviation
    or an initial.
    """
    pieces, start = [], 0
    for match in _END.finditer(text):
        piece = text[start : match.end()]
        more = text[match.end() :].lstrip()
        dot_only = match[0].strip(".") == ""
        if (
            more
            and dot_only
            and (more[0].islower() or (match[0] == "." and _ABBREVIATION.search(piece[-12:])))
        ):
            continue
        pieces.append(piece.strip())
        start = match.end()
    pieces.append(text[start:].strip())
    return [sentence for sentence in pieces if sentence]


def lines(text: str) -> list[str]:
    """Lines that hold something."""
    return [line for line in text.split("\n") if line.strip()]


def times(pattern: str, text: str) -> int:
    """How often a whole word or phrase occurs, in any case."""
    return len(re.findall(rf"\b{re.escape(pattern)}\b", text, re.IGNORECASE))
