"""Text of other people's programs on a user's terminal."""

from __future__ import annotations

import unicodedata


def escaped(text: str) -> str:
    r"""Write out what a terminal would act on instead of show, such as `\x1b` or a line's end.

    Tabs and wide spaces stay. Control characters (C0, C1), line separators, and characters that
    reorder or hide text do not.
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
        or unicodedata.category(character) == "Zs"  # a space in other widths
    )


def block(text: str, indent: str = "    ") -> str:
    """Lines of other people below a line of ours: escaped, and indented so that none looks ours."""
    return "\n".join(indent + escaped(line) for line in text.split("\n"))
