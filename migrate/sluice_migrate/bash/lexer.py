"""Splits shell text into words and operators, as bash does.

It handles quotes, comments, continued lines, here-documents, `NAME=(a b)`, `$NAME`, all forms of
`${...}`, `$((arithmetic))` and `$(command)`. `parser` builds commands from the words, `expansion`
computes their values.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=$")
# `${#NAME}`, `${!NAME}`, `${NAME[index]}`, and an operator with its operand.
_BRACED = re.compile(
    r"(?P<prefix>[#!]?)(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?!$-])(?:\[(?P<index>[^]]*)\])?"
    r"(?P<operator>:?[-=+?]|%%?|##?|//?|\^\^?|,,?|:|$)(?P<operand>.*)",
    re.DOTALL,
)
# Longer operators come first.
_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", "((", ";", "&", "|", "(", ")", "\n")
_PLAIN = re.compile(r"[^\s'\"\\$`;&|<>()]+")
_PAIRS = {"(": ")", "{": "}"}
# Characters that end a word.
_ENDS = " \t\r\n;&|<>)"


class ScriptError(ValueError):
    """The text is not valid bash. The message has the line."""


class PartKind(enum.Enum):
    """Kind of a part of a word."""

    TEXT = "text"
    VARIABLE = "variable"
    ARITHMETIC = "arithmetic"
    COMMAND = "command"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a word.

    text: literal text, a name, an expression, a command, or the source of an unknown expansion.
    source: the part as the script writes it. operator: that of `${NAME:-operand}`; "length" and
    "indirect" for `${#NAME}` and `${!NAME}`. index: that of `${NAME[index]}`.
    """

    kind: PartKind
    text: str
    quoted: bool = False
    source: str = ""
    operator: str = ""
    operand: Word | None = None
    index: str | None = None


@dataclass(slots=True)
class Word:
    """A word as the script writes it, before its expansion."""

    line: int
    parts: list[Part] = field(default_factory=list)
    array: list[Word] | None = None  # the words of `NAME=(...)`

    @property
    def literal(self) -> str:
        """The text before the first expansion."""
        text = ""
        for part in self.parts:
            if part.kind is not PartKind.TEXT:
                break
            text += part.text
        return text

    @property
    def plain(self) -> str:
        """The text of a word without quotes and expansions, as reserved words are; else ""."""
        bare = all(part.kind is PartKind.TEXT and not part.quoted for part in self.parts)
        return self.literal if bare else ""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator between commands: `;`, a line end, `&&`, a bracket."""

    text: str
    line: int


class Lexer:
    """Reads the words and operators of a text one by one."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.at, self.line = text, 0, line
        self.heredocs: list[str] = []

    def peek(self, width: int = 1) -> str:
        """Return the next characters without consuming them."""
        return self.text[self.at : self.at + width]

    def take(self, width: int = 1) -> str:
        """Consume the next characters."""
        taken = self.peek(width)
        self.at += len(taken)
        self.line += taken.count("\n")
        return taken

    def next(self) -> Word | Operator | None:
        """Return the next word or operator, without redirections; None at the end."""
        while True:
            self.space()
            if not self.peek():
                return None
            if self.peek() in "<>" or self.peek(2) == "&>":
                self._redirection()
                continue
            if operator := next((text for text in _OPERATORS if self.peek(len(text)) == text), ""):
                line = self.line
                self.take(len(operator))
                if operator == "\n":
                    self._skip_heredocs()
                return Operator(operator, line)
            if number := re.compile(r"\d+(?=[<>])").match(self.text, self.at):  # the 2 of 2>
                self.take(len(number.group()))
                continue
            return self.word()

    def space(self) -> None:
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

    def _redirection(self) -> None:
        operator = ""
        while self.peek() and self.peek() in "<>&":
            operator += self.take()
        if operator in ("<", ">") and self.peek() == "(":  # process substitution: <(command)
            self.balanced("(")
            return
        if operator == "<<" and self.peek() == "-":
            self.take()
        self.space()
        if self.peek() not in ("", "\n"):
            target = self.word()
            if operator == "<<":
                self.heredocs.append(target.literal)

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
        """Read a word."""
        word = Word(self.line)
        while self.peek() and self.peek() not in _ENDS:
            if self.peek() == "(":
                if not _ASSIGNMENT.match(word.literal) or word.array is not None:
                    break
                word.array = self._array()
            elif self.peek(2) == "\\\n":
                self.take(2)
            else:
                self.piece(word)
        if not word.parts:  # an empty quotation, or a stray character
            word.parts.append(Part(PartKind.TEXT, "", quoted=True))
        return word

    def piece(self, word: Word) -> None:
        """Read one part of a word: a quotation, an expansion or a run of characters."""
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
            word.parts.append(self._backticks(quoted=False))
        else:
            run = _PLAIN.match(self.text, self.at)
            word.parts.append(
                Part(PartKind.TEXT, character + (self.take(len(run.group())) if run else ""))
            )

    def _until(self, end: str) -> str:
        start, line = self.at, self.line
        while self.peek() != end:
            if not self.take():
                raise ScriptError(f"line {line}: {end} is opened here and never closed")
        text = self.text[start : self.at]
        self.take()
        return text

    def _double(self, word: Word) -> None:
        line, text = self.line, ""
        word.parts.append(Part(PartKind.TEXT, "", quoted=True))  # so that "" is a word
        while (character := self.take()) != '"':
            if not character:
                raise ScriptError(f'line {line}: " is opened here and never closed')
            if character == "\\" and self.peek() and self.peek() in '"\\$`\n':
                escaped = self.take()
                text += "" if escaped == "\n" else escaped
            elif character in "$`":
                word.parts.append(Part(PartKind.TEXT, text, quoted=True))
                text = ""
                word.parts.append(
                    self._expansion(quoted=True)
                    if character == "$"
                    else self._backticks(quoted=True)
                )
            else:
                text += character
        word.parts.append(Part(PartKind.TEXT, text, quoted=True))

    def _backticks(self, *, quoted: bool) -> Part:
        inner = self._until("`")
        return Part(PartKind.COMMAND, inner, quoted, f"`{inner}`")

    def _expansion(self, *, quoted: bool) -> Part:
        """Read the expansion after a `$`."""
        if self.peek(2) == "((":
            inner = self.balanced("(")
            return Part(PartKind.ARITHMETIC, inner[1:-1], quoted, f"$({inner})")
        if self.peek() == "(":
            inner = self.balanced("(")
            return Part(PartKind.COMMAND, inner, quoted, f"$({inner})")
        if self.peek() == "{":
            return self._braced(self.balanced("{"), quoted)
        if not quoted and self.peek() == "'":
            self.take()
            return Part(PartKind.TEXT, _ansi(self._until("'")), quoted=True)
        name = _NAME.match(self.text, self.at)
        if name:
            self.take(len(name.group()))
            return Part(PartKind.VARIABLE, name.group(), quoted, f"${{{name.group()}}}")
        if self.peek() and self.peek() in "@*#?!$-0123456789":
            name_ = self.take()
            return Part(PartKind.VARIABLE, name_, quoted, f"${name_}")
        return Part(PartKind.TEXT, "$", quoted)

    def balanced(self, opening: str) -> str:
        """Return the text up to the closing bracket; quoted brackets do not count."""
        closing, depth, line, start = _PAIRS[opening], 0, self.line, self.at + 1
        while True:
            character = self.take()
            if not character:
                raise ScriptError(f"line {line}: {opening} is opened here and never closed")
            if character == "\\":
                self.take()
            elif character == "'" and opening == "(":
                self._until("'")
            elif character == '"':
                self._double(Word(self.line))
            depth += (character == opening) - (character == closing)
            if depth == 0:
                return self.text[start : self.at - 1]

    def _braced(self, inner: str, quoted: bool) -> Part:
        source = f"${{{inner}}}"
        match = _BRACED.fullmatch(inner)
        if not match or (match["prefix"] and match["operator"]):
            return Part(PartKind.UNKNOWN, source, quoted, source)
        operator = {"#": "length", "!": "indirect"}.get(match["prefix"], match["operator"])
        operand = None if match["operator"] == "" else _operand(match["operand"], self.line, quoted)
        return Part(
            PartKind.VARIABLE, match["name"], quoted, source, operator, operand, match["index"]
        )

    def _array(self) -> list[Word]:
        line = self.line
        self.take()
        words: list[Word] = []
        while True:
            self.space()
            if self.peek() == "\n":
                self.take()
            elif self.peek() == ")":
                self.take()
                return words
            elif not self.peek():
                raise ScriptError(f"line {line}: ( is opened here and never closed")
            elif self.peek() in ";&|<>(":
                self.take()
            else:
                words.append(self.word())


def _operand(text: str, line: int, quoted: bool) -> Word:
    """Parse the operand of `${NAME:-operand}`.

    It has quotes and expansions, and blanks do not end it. In double quotes a single quote is an
    ordinary character.
    """
    lexer, word = Lexer(text, line), Word(line)
    while lexer.peek():
        if quoted and lexer.peek() == "'":
            word.parts.append(Part(PartKind.TEXT, lexer.take(), quoted=True))
        elif lexer.peek(2) == "\\\n":
            lexer.take(2)
        else:
            lexer.piece(word)
    return word


def words_of(text: str, line: int) -> Word:
    """Parse the expression of `$((expression))`, which is expanded as in double quotes."""
    return _operand(text.replace('"', ""), line, quoted=True)


def _ansi(text: str) -> str:
    """Decode the escapes of `$'...'`."""
    escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a"}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[0]), text)
