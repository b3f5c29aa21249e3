"""The arguments of SGLang's server, as its launch script reads them before SGLang does."""

from collections.abc import Sequence


def last(arguments: Sequence[str], *names: str) -> str:
    """The value that counts of an argument with these names, as `--name value` or `--name=value`:
    the last one. Empty: it is not there.
    """
    words = _words(arguments)
    values = [words[at + 1] for at, word in enumerate(words[:-1]) if word in names]
    return values[-1] if values else ""


def number(arguments: Sequence[str], default: int, *names: str) -> int:
    """The same as a number. default: it is not there, or is none, which SGLang will refuse."""
    value = last(arguments, *names)
    return int(value) if value.isdecimal() else default


def has(arguments: Sequence[str], flag: str) -> bool:
    """True where this argument is there, with or without a value."""
    return flag in _words(arguments)


def _words(arguments: Sequence[str]) -> list[str]:
    return [part for word in arguments for part in word.split("=", 1)]
