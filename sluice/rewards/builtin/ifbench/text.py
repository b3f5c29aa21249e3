"""How the instruction checks read a text: words, sentences, paragraphs.

English, without language models.
"""

from __future__ import annotations

import re
import string

from sluice.rewards.builtin.ifbench.function_words import FUNCTION_WORDS

PUNCTUATION = string.punctuation + " "
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+(?:['’-]\w+)*")
# Abbreviations that no sentence ends with.
_BEFORE_MORE = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|e\.g|i\.e|cf)\.$", re.IGNORECASE)
_BEFORE_NUMBER = re.compile(r"\b(?:No|Nos|Fig|Vol|p|pp)\.$", re.IGNORECASE)
# Those that may end one, and initials.
_ABBREVIATION = re.compile(r"\b(?:Jr|Sr|Inc|Ltd|Co|etc|U\.S|a\.m|p\.m|[A-Za-z])\.$", re.IGNORECASE)
_CAPITALISED = re.compile(r"[A-Z]\w*\b(?!\.)")
# Characters behind a mark that are looked at.
_AHEAD = 40
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

    As Punkt decides (Kiss and Strunk 2006; nltk, which IFEval counts with), by rules for its
    statistics: a letter in lower case may begin a sentence, but not after an ellipsis.
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
    """True where the mark at the end of the piece ends a sentence. more: what follows."""
    if mark.strip("."):
        return True
    if len(mark) > 1:
        return not more[0].islower()
    if _BEFORE_MORE.search(piece) or (_BEFORE_NUMBER.search(piece) and more[0].isdigit()):
        return False
    if not _ABBREVIATION.search(piece):
        return True
    # A name has its capital letter anywhere, a function word only where a sentence begins.
    word = _CAPITALISED.match(more)
    return word is not None and word[0].lower() in FUNCTION_WORDS


def lines(text: str) -> list[str]:
    """Lines that hold something."""
    return [line for line in text.split("\n") if line.strip()]


def times(pattern: str, text: str) -> int:
    """How often a whole word or phrase occurs, in any case."""
    return len(re.findall(rf"\b{re.escape(pattern)}\b", text, re.IGNORECASE))
