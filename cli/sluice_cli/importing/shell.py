"""Shell text -> statements of words. A subset of bash, parsed and never run.

Known: quotes, comments, continued lines, `NAME=value`, `NAME=(a b)`, `NAME+=(...)`, `$NAME`,
`${NAME}`, `${NAME:-default}`, `${NAME[@]}`, `$((arithmetic))`, redirections, here-documents, and
what joins commands. What only a shell could tell, `$(command)` or `${NAME%pattern}`, becomes a part
of kind UNKNOWN with its own text.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=$")
_BRACED = re.compile(
    r"^(?P<name>[A-Za-z_]\w*)(?:(?P<array>\[[@*]\])|:?[-=](?P<default>.*))?$", re.DOTALL
)
_JOINS = ";&|()"
_PAIRS = {"(": ")", "{": "}"}


class ScriptError(ValueError):
    """Text that no shell would take either. The message has the line."""


class PartKind(enum.Enum):
    TEXT = "text"
    VARIABLE = "variable"
    ARRAY = "array"
    ARITHMETIC = "arithmetic"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word.

    text: literal text, a name, an expression, or the source of what is not known.
    """

    kind: PartKind
    text: str
    quoted: bool = False
    default: Word | None = None


@dataclass(slots=True)
class Word:
    line: int
    parts: list[Part] = field(default_factory=list)
    array: list[Word] | None = None
    """The words of `NAME=(...)`."""

    @property
    def literal(self) -> str:
        """The text before the first expansion."""
        text = ""
        for part in self.parts:
            if part.kind is not PartKind.TEXT:
                break
            text += part.text
        return text


Statement = list[Word]


def parse(text: str) -> list[Statement]:
    """The simple commands of a script in order, whatever joins them. Raises ScriptError."""
    return _Parser(text).statements()


class _Parser:
    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.at, self.line = text, 0, line
        self.heredocs: list[str] = []

    def peek(self, width: int = 1) -> str:
        return self.text[self.at : self.at + width]

    def take(self, width: int = 1) -> str:
        taken = self.peek(width)
        self.at += len(taken)
        self.line += taken.count("\n")
        return taken

    def statements(self) -> list[Statement]:
        statements: list[Statement] = [[]]
        while self.at < len(self.text):
            self._space()
            if self.peek() == "\n":
                self.take()
                self._skip_heredocs()
                statements.append([])
            elif self.peek() and self.peek() in _JOINS:
                self.take()
                statements.append([])
            elif self.peek() and self.peek() in "<>":
                self._redirection(statements[-1])
            elif self.peek():
                statements[-1].append(self.word())
        return [statement for statement in statements if statement]

    def _space(self) -> None:
        """Skip blanks, continued lines and a comment."""
        while True:
            if self.peek() and self.peek() in " \t\r":
                self.take()
            elif self.peek(2) == "\\\n":
                self.take(2)
            elif self.peek() == "#":
                while self.peek() not in ("", "\n"):
                    self.take()
            else:
                return

    def _redirection(self, statement: Statement) -> None:
        operator = ""
        while self.peek() and self.peek() in "<>&":
            operator += self.take()
        self._space()
        if statement and statement[-1].literal.isdigit():  # 2>
            statement.pop()
        if self.peek() not in ("", "\n"):
            target = self.word()
            if operator == "<<":
                self.heredocs.append(target.literal.removeprefix("-"))

    def _skip_heredocs(self) -> None:
        for end in self.heredocs:
            while self.at < len(self.text):
                start = self.at
                while self.peek() not in ("", "\n"):
                    self.take()
                line = self.text[start : self.at]
                self.take()
                if line.strip() == end:
                    break
        self.heredocs = []

    def word(self) -> Word:
        word = Word(self.line)
        while self.peek() and self.peek() not in " \t\r\n;&|<>)":
            if self.peek() == "(":
                if not _ASSIGNMENT.match(word.literal) or word.array is not None:
                    break
                word.array = self._array()
            elif self.peek(2) == "\\\n":
                self.take(2)
            else:
                self._piece(word)
        if not word.parts:  # an empty quotation, or a character that means nothing here
            word.parts.append(Part(PartKind.TEXT, "", quoted=True))
        return word

    def _piece(self, word: Word) -> None:
        character = self.take()
        if character == "'":
            word.parts.append(Part(PartKind.TEXT, self._until("'"), quoted=True))
        elif character == '"':
            self._double(word)
        elif character == "\\":
            word.parts.append(Part(PartKind.TEXT, self.take(), quoted=True))
        elif character == "$":
            word.parts.append(self._expansion(quoted=False))
        elif character == "`":
            word.parts.append(Part(PartKind.UNKNOWN, f"`{self._until('`')}`"))
        else:
            word.parts.append(Part(PartKind.TEXT, character))

    def _until(self, end: str) -> str:
        start, line = self.at, self.line
        while self.peek() != end:
            if not self.take():
                raise ScriptError(f"line {line}: {end} opens here and is never closed")
        text = self.text[start : self.at]
        self.take()
        return text

    def _double(self, word: Word) -> None:
        line, text = self.line, ""
        word.parts.append(Part(PartKind.TEXT, "", quoted=True))  # "" is a word
        while (character := self.take()) != '"':
            if not character:
                raise ScriptError(f'line {line}: " opens here and is never closed')
            if character == "\\" and self.peek() in ('"', "\\", "$", "`", "\n"):
                escaped = self.take()
                text += "" if escaped == "\n" else escaped
            elif character in "$`":
                word.parts.append(Part(PartKind.TEXT, text, quoted=True))
                text = ""
                word.parts.append(
                    self._expansion(quoted=True)
                    if character == "$"
                    else Part(PartKind.UNKNOWN, f"`{self._until('`')}`")
                )
            else:
                text += character
        word.parts.append(Part(PartKind.TEXT, text, quoted=True))

    def _expansion(self, *, quoted: bool) -> Part:
        """The word that follows a `$`."""
        if self.peek(2) == "((":
            inner = self._balanced("(")
            return Part(PartKind.ARITHMETIC, inner[1:-1], quoted)
        if self.peek() == "(":
            return Part(PartKind.UNKNOWN, f"$({self._balanced('(')})", quoted)
        if self.peek() == "{":
            return self._braced(self._balanced("{"), quoted)
        name = _NAME.match(self.text, self.at)
        if name:
            self.take(len(name.group()))
            return Part(PartKind.VARIABLE, name.group(), quoted)
        if self.peek() and self.peek() in "@*#?!0123456789":
            return Part(PartKind.ARRAY, self.take(), quoted)  # arguments of the script: it has none
        return Part(PartKind.TEXT, "$", quoted)

    def _balanced(self, opening: str) -> str:
        """The text between a bracket and its own closing one."""
        closing, depth, line, start = _PAIRS[opening], 0, self.line, self.at + 1
        while True:
            character = self.take()
            if not character:
                raise ScriptError(f"line {line}: {opening} opens here and is never closed")
            if character == "'" and opening == "(":
                self._until("'")
            depth += (character == opening) - (character == closing)
            if depth == 0:
                return self.text[start : self.at - 1]

    def _braced(self, inner: str, quoted: bool) -> Part:
        match = _BRACED.match(inner)
        if not match:
            return Part(PartKind.UNKNOWN, f"${{{inner}}}", quoted)
        if match["array"]:
            return Part(PartKind.ARRAY, match["name"], quoted)
        default = None if match["default"] is None else _quoted(match["default"], self.line)
        return Part(PartKind.VARIABLE, match["name"], quoted, default)

    def _array(self) -> list[Word]:
        line = self.line
        self.take()
        words: list[Word] = []
        while True:
            self._space()
            if self.peek() == "\n":
                self.take()
            elif self.peek() == ")":
                self.take()
                return words
            elif not self.peek():
                raise ScriptError(f"line {line}: ( opens here and is never closed")
            elif self.peek() in ";&|<>(":
                self.take()
            else:
                words.append(self.word())


def _quoted(text: str, line: int) -> Word:
    """A default, `${NAME:-this}`: quotes and expansions count in it, blanks do not end it."""
    parser, word = _Parser(text, line), Word(line)
    while parser.peek():
        if parser.peek() in " \t\n":
            word.parts.append(Part(PartKind.TEXT, parser.take(), quoted=True))
        else:
            parser._piece(word)
    return word
