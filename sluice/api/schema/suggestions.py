"""Suggestions for misspelt words in messages about a manifest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(word: str, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the closest choice, or all choices."""
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
