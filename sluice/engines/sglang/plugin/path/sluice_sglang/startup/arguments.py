"""Arguments of SGLang's server, as its launch script reads them before SGLang does."""

from collections.abc import Sequence


def last(arguments: Sequence[str], *names: str) -> str:
    """Return the last value of an argument with these names; empty if it is missing.

    Both `--name value` and `--name=value` are read. The last one counts.
    """
    words = _words(arguments)
    values = [words[at + 1] for at, word in enumerate(words[:-1]) if word in names]
    return values[-1] if values else ""


def number(arguments: Sequence[str], default: int, *names: str) -> int:
    """Return the last value as a number; `default` if it is missing or not a number.

    SGLang refuses what is not a number.
    """
    value = last(arguments, *names)
    return int(value) if value.isdecimal() else default


def has(arguments: Sequence[str], flag: str) -> bool:
    """Return True if this argument is there, with or without a value."""
    return flag in _words(arguments)


def _words(arguments: Sequence[str]) -> list[str]:
    return [part for word in arguments for part in word.split("=", 1)]
