"""Safe output of untrusted text on a terminal."""

from __future__ import annotations

import unicodedata


def escaped(text: str) -> str:
    r"""Escape what a terminal would act on instead of showing, such as `\x1b` or a line end.

    Tabs and wide spaces stay. Control characters (C0, C1), line separators, and characters that
    reorder or hide text are escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        character if _is_shown(character) else character.encode("unicode_escape").decode()
        for character in text
    )


def _is_shown(character: str) -> bool:
    return (
        character.isprintable()
        or character == "\t"
        or unicodedata.category(character) == "Zs"  # spaces of other widths
    )


def block(text: str, indent: str = "    ") -> str:
    """Escape and indent untrusted lines, so that none looks like a line of the program itself."""
    return "\n".join(indent + escaped(line) for line in text.split("\n"))
