"""Checks of values from outside, made once, at the place where they enter.

Rows of files, recorded conversations, `result.json`, the metadata of episodes, answers of tools,
rewards, requests of agents and messages of peers are written by other people's programs. Python
reads more than it can write, pickle or send afterwards: half of a surrogate pair, an integer of
5,000 digits, a list in a list in a list. A value that passes here can be encoded as JSON and as
UTF-8, pickled, and read again by every other process. The caller decides what a refusal costs: a
row, a sample, a request, but never a process.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

# Most lists and objects within each other.
MAX_DEPTH = 64
# Most digits of an integer: Python converts no more of them from text and to text.
MAX_DIGITS = sys.int_info.default_max_str_digits
# Most numbers, texts, lists and objects in one value.
MAX_VALUES = 1 << 20
# Most bytes of all texts in one value, keys included, as UTF-8.
MAX_BYTES = 64 << 20
FLOAT32_MAX = 3.4028234663852886e38
# Largest magnitude of a reward: sums of squares over a batch stay far within float32.
MAX_REWARD = 1e15

_INTEGER_BOUND = 10**MAX_DIGITS
_LONGEST_PATH = 80
_SHOWN = 200


class InputError(ValueError):
    """The value cannot be accepted. The message names the place in it and the reason."""


def check_value(value: Any, name: str, *, as_text: bool = False) -> None:
    """Check that a value can be written as JSON, and read again by every other process.

    Parameters
    ----------
    value
        Texts, numbers, booleans, None, and lists, tuples and dictionaries of them.
    name
        Name of the value in the message, such as `metadata`.
    as_text
        Accept objects of other types, which the caller writes as `str` of them.

    Raises
    ------
    InputError
        If a text in it is not encodable as UTF-8, a number is not finite or has more than
        MAX_DIGITS digits, the value is nested more than MAX_DEPTH deep or larger than MAX_VALUES
        or MAX_BYTES, or, unless `as_text`, a part of it has no form in JSON.

    """
    fault = _Walk(as_text).fault(value, 0)
    if fault is not None:
        raise InputError(f"{_shortened(name + fault.path)}: {fault.words}")


def check_text(text: str, name: str) -> None:
    """Raise InputError if the text has half of a surrogate pair, so UTF-8 cannot encode it."""
    if words := _text_fault(text):
        raise InputError(f"{name}: {words}")


def load_json(data: str | bytes, name: str) -> Any:
    """Parse JSON of unknown origin and check it as `check_value` does.

    Parameters
    ----------
    data
        The document. Bytes must be UTF-8.
    name
        Name of the document in the message, such as `result.json`.

    Returns
    -------
    The value.

    Raises
    ------
    InputError
        If it is not valid JSON, or the value does not pass `check_value`. NaN and Infinity, which
        Python reads and JSON does not have, are refused.

    """
    try:
        text = data if isinstance(data, str) else data.decode()
        value = _DECODER.decode(text)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{name}: not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError:
        raise InputError(f"{name}: {_TOO_DEEP}") from None
    except ValueError:  # the only cause left is Python's limit of digits
        raise InputError(f"{name}: {_TOO_MANY_DIGITS}") from None
    if not _plainly_sound(text):
        check_value(value, name)
    return value


def float32(value: Any, name: str, *, largest: float = FLOAT32_MAX) -> float:
    """Convert a number, or an array of one, that becomes a float32 on its way.

    Parameters
    ----------
    value
        An int, a float, or what has `__float__`, as scalars of numpy and torch do.
    name
        Name of the number in the message, such as `turn_rewards[2]`.
    largest
        Largest magnitude.

    Raises
    ------
    InputError
        If it is not a number, not finite, or beyond `largest`.

    """
    if not is_number(value):
        raise InputError(f"{name} is {type(value).__name__} {shown(value)}, expected a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:  # an array, an int beyond floats
        raise InputError(
            f"{name} is {type(value).__name__}, expected one number: {error}"
        ) from error
    if not abs(number) <= largest:  # also false for NaN
        raise InputError(f"{name} is {number}, expected a finite number of at most {largest:.3g}")
    return number


def reward(value: Any, name: str = "the reward") -> float:
    """`float32` with the bound of rewards, MAX_REWARD."""
    return float32(value, name, largest=MAX_REWARD)


def is_number(value: Any) -> bool:
    """True for a value that `float` takes as a number, except a text."""
    return isinstance(value, int | float) or hasattr(value, "__float__")


def without_surrogates(text: str) -> str:
    """Replace each half of a surrogate pair by U+FFFD.

    For texts that only people or a model read, such as error messages and answers of tools.
    """
    return (
        text
        if _text_fault(text) is None
        else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def shown(value: Any) -> str:
    """Return the `repr` of a value, shortened for an error message; UTF-8 can encode it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, a list too deep
        return f"a value of type {type(value).__name__}"
    cut = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
    return without_surrogates(cut)


@dataclass(frozen=True, slots=True)
class _Fault:
    """A fault in a value.

    `path` leads from the value to the part at fault, such as `.turns[3]`.
    """

    path: str
    words: str

    def within(self, step: str) -> _Fault:
        return _Fault(step + self.path, self.words)


_TOO_DEEP = f"nested more than {MAX_DEPTH} deep"
_TOO_MANY_DIGITS = f"an integer of more than {MAX_DIGITS} digits"


@dataclass(slots=True)
class _Walk:
    """A pass over a value, which counts the parts that it meets."""

    as_text: bool
    values: int = 0
    size: int = 0

    def fault(self, value: Any, depth: int) -> _Fault | None:
        """Return the first fault of a value that is `depth` deep; None if it is valid."""
        self.values += 1
        if self.values > MAX_VALUES:
            return _Fault("", f"more than {MAX_VALUES} values")
        if not isinstance(value, dict | list | tuple):
            words = self._leaf(value)
            return _Fault("", words) if words else None
        if depth >= MAX_DEPTH:
            return _Fault("", _TOO_DEEP)
        if isinstance(value, dict):
            return self._object(value, depth + 1)
        return self._list(value, depth + 1)

    def _leaf(self, value: Any) -> str | None:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int):  # booleans are among them
            return None if -_INTEGER_BOUND < value < _INTEGER_BOUND else _TOO_MANY_DIGITS
        if isinstance(value, float):
            return None if math.isfinite(value) else f"{value} is not a finite number"
        if value is None or self.as_text:
            return None
        return f"{type(value).__name__} has no form in JSON"

    def _text(self, text: str) -> str | None:
        self.size += len(text) if text.isascii() else 4 * len(text)
        if self.size > MAX_BYTES:
            return f"texts of more than {MAX_BYTES >> 20} MiB"
        return _text_fault(text)

    def _object(self, entries: dict[Any, Any], depth: int) -> _Fault | None:
        for key, entry in entries.items():
            if isinstance(key, str | int | float) or key is None:
                words = self._leaf(key)
            else:
                words = f"{type(key).__name__} cannot be a key of a JSON object"
            if words:
                return _Fault("", f"key {shown(key)}: {words}")
            fault = self.fault(entry, depth)
            if fault is not None:
                return fault.within(f".{key}" if isinstance(key, str) else f"[{key}]")
        return None

    def _list(self, entries: list[Any] | tuple[Any, ...], depth: int) -> _Fault | None:
        for position, entry in enumerate(entries):
            fault = self.fault(entry, depth)
            if fault is not None:
                return fault.within(f"[{position}]")
        return None


def _text_fault(text: str) -> str | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        return (
            f"half of a surrogate pair, {half}, at character {error.start}: such a text cannot be "
            "written as UTF-8"
        )
    return None


def _plainly_sound(text: str) -> bool:
    """True if a decoded document needs no further check.

    Its numbers are checked while it is decoded. This saves the walk for most documents.
    """
    return (
        len(text) <= MAX_VALUES
        and text.count("[") + text.count("{") <= MAX_DEPTH
        and "\\ud" not in text
        and "\\uD" not in text
        and _text_fault(text) is None
    )


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise InputError(f"{literal[:20]} is not a finite number")
    return number


def _no_constant(literal: str) -> NoReturn:
    raise InputError(f"{literal} is not a finite number")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)


def _shortened(path: str) -> str:
    return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}..."
