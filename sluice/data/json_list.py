"""Read a JSON list entry by entry, with memory for a chunk and the largest entry only."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from sluice.runtime.pod_env import ConfigurationError

_CHUNK = 1 << 20
# An error this close to the end of the text that was read may be an unfinished entry: the
# longest literal, `-Infinity`, and the longest escape, `\ud83d\ude00`, are shorter.
_MARGIN = 16

_BEHIND = tuple(" \t\n\r,]")


def read_json_list(file: IO[bytes], name: str) -> Iterator[tuple[Any, int, int]]:
    """Yield each entry with the line and column, from 1, at which it begins.

    Raises ConfigurationError `name:line:column: what`.
    """
    text = _Text(file, name)
    first = text.peek()
    if first != "[":
        hint = "; if every line is a row, call the file .jsonl" if first == "{" else ""
        raise text.error(f"expected a list of rows, found {first!r}{hint}")
    text.advance(1)
    more = text.peek() != "]"
    while more:
        text.peek()
        line, column = text.line, text.column
        yield text.value(), line, column
        behind = text.peek()
        if behind not in ("]", ","):
            raise text.error(
                "not valid JSON: expected , or ] after a row, found "
                f"{behind or 'the end of the file'}"
            )
        more = behind == ","
        if more:
            text.advance(1)
    text.advance(1)
    if text.peek():
        raise text.error("not valid JSON: the list is followed by more text")


class _Text:
    """Text that was read from a file and not yet consumed, with its position in the file."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text, self._at, self._read, self._ended = "", 0, 0, False
        self.line = self.column = 1

    def peek(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            rest = len(self._text)
            at = self._at
            while at < rest and self._text[at] in " \t\n\r":
                at += 1
            self.advance(at - self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill()

    def advance(self, count: int) -> None:
        start, end = self._at, self._at + count
        lines = self._text.count("\n", start, end)
        self.line += lines
        self.column = end - self._text.rfind("\n", start, end) if lines else self.column + count
        self._at = end

    def value(self) -> Any:
        """Return the JSON value that begins here."""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not self._unfinished(error):
                    self.advance(error.pos - self._at)
                    raise self.error(f"not valid JSON: {error.msg}") from error
            except RecursionError as error:
                raise self.error("not valid JSON: nested too deeply") from error
            except ValueError as error:  # a number with more digits than Python parses
                raise self.error(f"not valid JSON: {error}") from error
            else:
                if (
                    self._ended
                    or self._text[end : end + 1] in _BEHIND
                    or end < len(self._text) - _MARGIN
                ):
                    self.advance(end - self._at)
                    return value  # otherwise it may be the start of a number: 0 of 0.5, 1 of 1e-9
            self._fill()

    def _unfinished(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _MARGIN

    def _fill(self) -> None:
        data = self._file.read(max(_CHUNK, len(self._text) - self._at))  # doubles for a long entry
        self._ended = not data
        try:
            more = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            at = self._read + error.start
            raise ConfigurationError(
                f"{self._name}: not UTF-8 text: {error.reason} near byte {at}"
            ) from error
        self._read += len(data)
        self._text, self._at = self._text[self._at :] + more, 0

    def error(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._name}:{self.line}:{self.column}: {what}")
