"""Expands words as bash does: variables, their operators, arithmetic, commands, field splitting.

A value that is not known keeps the text of the script, and `missing` lists what it depends on.
Values are never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sluice_migrate.bash.arithmetic import evaluate
from sluice_migrate.bash.lexer import Part, PartKind, Word, words_of
from sluice_migrate.bash.patterns import (
    change_case,
    expand_braces,
    glob,
    split_replacement,
    strip_affix,
)

# Variables that refer to variables in arithmetic; more of them are a cycle.
_DEEPEST = 20
# A word between blanks; blanks in an unknown `$(a command)` do not split it.
_PIECES = re.compile(r"(?:\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\$\{[^}]*\}|\S)+")
_ALL = ("@", "*")


@dataclass(frozen=True, slots=True)
class Argument:
    """A word of a command.

    missing: variables and commands that it depends on and that are not known. conditional:
    variables in it that are set under a condition that is not known.
    """

    text: str
    line: int
    missing: tuple[str, ...] = ()
    conditional: tuple[str, ...] = ()


@dataclass(slots=True)
class Variables:
    """The variables that a script has set so far.

    environment: variables given by --var, which win over assignments of the script. arguments: `$1`
    and following. source: the path of the script, `$0`. unknown_arrays: arrays that were read but
    never set.
    """

    values: dict[str, Argument] = field(default_factory=dict)
    arrays: dict[str, list[Argument]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)
    source: str = ""
    unknown_arrays: list[str] = field(default_factory=list)

    def get(self, name: str, line: int) -> Argument | None:
        """Return the value of a scalar, or the first of an array; None if it is not set."""
        if name in self.environment:
            return Argument(self.environment[name], line)
        if name in self.values:
            return self.values[name]
        if name in self.arrays:
            return next(iter(self.arrays[name]), Argument("", line))
        if name == "#":
            return Argument(str(len(self.arguments)), line)
        if name == "0":
            return Argument(self.source, line) if self.source else None
        if name.isdigit():
            return dict(enumerate(self.arguments, start=1)).get(int(name))
        return None

    def all(self, name: str) -> list[Argument] | None:
        """Return all values of an array; None if it is not set."""
        if name in _ALL:
            return self.arguments
        if name in self.arrays:
            return self.arrays[name]
        value = self.get(name, 0)
        return None if value is None else [value]


class Expander:
    """Expands words into arguments.

    run: returns the output of a command, or None if it is not known. lenient: an unset variable is
    empty, as in a condition; else it keeps its name.
    """

    def __init__(self, variables: Variables, run: Callable[[str, int], Argument | None]) -> None:
        self.variables, self.run = variables, run
        self.lenient = False

    def words(self, word: Word) -> list[Argument]:
        """Expand a word into any number of words."""
        return [field for piece in expand_braces(word) for field in self._split(piece)]

    def joined(self, word: Word, *, quoted: bool = False) -> Argument:
        """Expand a word into a single text, as in an assignment; `~` stays if it is quoted."""
        values = [
            self._value(part, word.line, first=position == 0 and not quoted)
            for position, part in enumerate(word.parts)
        ]
        return _joined("", values, word.line)

    def number(self, text: str, line: int) -> tuple[int, tuple[str, ...]]:
        """Evaluate an arithmetic expression; returns its value and the variables that are missing.

        Raises ValueError and ArithmeticError.
        """
        filled = self.joined(words_of(text, line))
        missing = list(filled.missing)
        # An unknown `${NAME}` is looked up as a variable by the arithmetic.
        filled = replace(filled, text=re.sub(r"\$\{(\w+)\}", r"\1", filled.text))

        def get(name: str, depth: int = 0) -> int:
            value = self.variables.get(name, line)
            if value is None:
                missing.extend(() if self.lenient else (name,))
                return 0
            missing.extend(value.missing)
            if value.missing:
                return 1  # any number, since the result is reported as missing
            if depth > _DEEPEST:
                raise ValueError(f"{name} refers to itself")
            return evaluate(value.text, lambda inner: get(inner, depth + 1), put)

        def put(name: str, value: int) -> None:
            self.variables.values[name] = Argument(str(value), line, tuple(missing))

        return evaluate(filled.text, get, put), tuple(dict.fromkeys(missing))

    # Expansion of one word.

    def _split(self, word: Word) -> list[Argument]:
        fields = _Fields(word.line)
        parts = [part for part in word.parts if part.text or part.kind is not PartKind.TEXT]
        if not any(self._is_list(part) for part in parts):
            parts = word.parts  # "" is a word, "${EMPTY[@]}" is not
        for position, part in enumerate(parts):
            if self._is_list(part):
                chosen = self._chosen(part)
                values = self._elements(part) if chosen is None else self.words(chosen)
                fields.several(values, splits=chosen is None and not part.quoted)
                continue
            value = self._value(part, word.line, first=position == 0)
            splits = part.kind is not PartKind.TEXT and not part.quoted
            # A quoted operand, as in ${NAME:-"a b"}, is not split.
            if splits and part.operand and any(inner.quoted for inner in part.operand.parts):
                splits = part.operator.lstrip(":") not in ("-", "=", "+")
            fields.blank_separated(value) if splits else fields.add(value, part.quoted)
        return fields.finish()

    def is_unset(self, word: Word) -> bool:
        """Tell whether the word is an unquoted `$NAME` that is not set; bash drops such a word."""
        part = word.parts[0]
        return (
            len(word.parts) == 1
            and part.kind is PartKind.VARIABLE
            and not (part.quoted or part.operator or part.index)
            and part.text not in _ALL
            and self.variables.get(part.text, 0) is None
        )

    def _chosen(self, part: Part) -> Word | None:
        """Return the operand if it replaces the list in `${NAME[@]:-word}` or `${NAME[@]+word}`."""
        values, operator = self.variables.all(part.text), part.operator.lstrip(":")
        if operator == "+":
            return part.operand if values else Word(0)
        return part.operand if operator == "-" and not values else None

    def _elements(self, part: Part) -> list[Argument]:
        """Return the values of a list."""
        values = self.variables.all(part.text)
        if values is None:
            self.variables.unknown_arrays.append(part.text)
            return []
        if part.operator.lstrip(":") in ("", "-"):
            return values
        return [self._operate(part, value, value.line) for value in values]

    def _is_list(self, part: Part) -> bool:
        named = (part.text, part.index)
        separate = "@" in named or ("*" in named and not part.quoted)
        return (
            separate
            and part.kind is PartKind.VARIABLE
            and part.operator not in ("length", "indirect")
        )

    def _value(self, part: Part, line: int, *, first: bool = False) -> Argument:
        match part.kind:
            case PartKind.TEXT:
                return Argument(self._home(part) if first else part.text, line)
            case PartKind.VARIABLE:
                return self._variable(part, line)
            case PartKind.ARITHMETIC:
                return self._arithmetic(part, line)
            case PartKind.COMMAND:
                output = self.run(part.text, line)
                return output or Argument(part.source, line, (part.source,))
            case PartKind.UNKNOWN:
                return Argument(part.source, line, (part.source,))

    def _home(self, part: Part) -> str:
        home = self.variables.environment.get("HOME")
        if part.quoted or home is None or not re.match(r"~(/|$)", part.text):
            return part.text
        return home + part.text[1:]

    def _arithmetic(self, part: Part, line: int) -> Argument:
        try:
            value, missing = self.number(part.text, line)
        except (ValueError, ArithmeticError):
            return Argument(part.source, line, (part.source,))
        return Argument(part.source if missing else str(value), line, missing)

    def _variable(self, part: Part, line: int) -> Argument:
        value = self._plain(part, line)
        match part.operator:
            case "":
                return self._or_its_name(part, value, line)
            case "length":
                return self._length(part, value, line)
            case "indirect":
                inner = self.variables.get(value.text, line) if value else None
                return inner or Argument(part.source, line, (part.source,))
            case ":" | "%" | "%%" | "#" | "##" | "/" | "//" | "^" | "^^" | "," | ",,":
                if value is None and not self.lenient:
                    return Argument(part.source, line, (part.text,))
                return self._operate(part, value or Argument("", line), line)
        empty = value is None or (part.operator.startswith(":") and value.text == "")
        return self._alternative(part, value, line, empty=empty)

    def _plain(self, part: Part, line: int) -> Argument | None:
        """Return the value without the operator applied."""
        if part.text in _ALL or part.index in _ALL:
            values = self.variables.all(part.text)
            return None if values is None else _joined(self._separator(), values, line)
        if part.index is None:
            return self.variables.get(part.text, line)
        if part.text in ("BASH_SOURCE", "PIPESTATUS"):
            return self.variables.get("0", line)
        values = self.variables.all(part.text)
        if values is None:
            return None
        try:
            at, missing = self.number(part.index, line)
        except (ValueError, ArithmeticError):
            missing = (part.source,)
        if missing:
            return Argument(part.source, line, missing)
        return values[at] if -len(values) <= at < len(values) else None

    def _separator(self) -> str:
        ifs = self.variables.get("IFS", 0)
        return " " if ifs is None else ifs.text[:1]

    def _or_its_name(self, part: Part, value: Argument | None, line: int) -> Argument:
        if value is not None:
            return value
        if self.lenient or part.text[0] in "@*?!-0123456789":
            return Argument("", line)
        name = part.text if part.text.isidentifier() else part.source
        return Argument(part.source, line, (name,))

    def _length(self, part: Part, value: Argument | None, line: int) -> Argument:
        if part.index in _ALL:
            return Argument(str(len(self.variables.all(part.text) or [])), line)
        if value is None or value.missing:
            return Argument(part.source, line, value.missing if value else (part.text,))
        return Argument(str(len(value.text)), line)

    def _alternative(
        self, part: Part, value: Argument | None, line: int, *, empty: bool
    ) -> Argument:
        """Apply `:-`, `:=`, `:+` or `:?`; without the colon an empty value counts as set."""
        operand = part.operand or Word(line)
        match part.operator[-1]:
            case "+":
                empty_ = Argument("", line)
                return empty_ if empty else self.joined(operand, quoted=part.quoted)
            case "?":
                if empty or value is None:
                    return Argument(f"${{{part.text}}}", line, (part.text,))
                return value
            case "=" if empty:
                self.variables.values[part.text] = self.joined(operand, quoted=part.quoted)
                return self.variables.values[part.text]
        return (
            value if value is not None and not empty else self.joined(operand, quoted=part.quoted)
        )

    def _operate(self, part: Part, value: Argument, line: int) -> Argument:
        """Apply `%`, `#`, `/`, `:`, `^` or `,` to a value that is set."""
        if value.missing:
            return replace(value, text=part.source)
        operand = part.operand or Word(line)
        if part.operator == ":":
            return self._substring(part, value, line)
        if part.operator[0] in "^,":
            return replace(value, text=change_case(value.text, part.operator))
        if part.operator[0] == "/":
            return self._replaced(operand, value, everywhere=part.operator == "//")
        pattern = self.pattern(operand)
        return replace(value, text=strip_affix(value.text, part.operator, pattern))

    def _substring(self, part: Part, value: Argument, line: int) -> Argument:
        source = "".join(inner.source or inner.text for inner in (part.operand or Word(line)).parts)
        start_text, separator, length_text = source.partition(":")
        try:
            start, missing = self.number(start_text, line)
            length, more = self.number(length_text, line) if separator else (None, ())
        except (ValueError, ArithmeticError):
            return Argument(part.source, line, (part.source,))
        if missing or more:
            return Argument(part.source, line, (*missing, *more))
        rest = value.text[start:]
        return replace(value, text=rest if length is None else rest[:length])

    def _replaced(self, operand: Word, value: Argument, *, everywhere: bool) -> Argument:
        pattern_word, new_word = split_replacement(operand)
        pattern, anchor = self.pattern(pattern_word), pattern_word.literal[:1]
        if anchor in ("#", "%") and not pattern_word.parts[0].quoted:
            pattern = pattern[len(re.escape(anchor)) :]
            pattern = f"\\A{pattern}" if anchor == "#" else f"{pattern}\\Z"
        new = self.joined(new_word).text
        count = 0 if everywhere else 1
        text = re.sub(pattern, lambda _: new, value.text, count=count, flags=re.DOTALL)
        return replace(value, text=text if pattern else value.text)

    def pattern(self, word: Word) -> str:
        """Convert a shell pattern to a regular expression; quoted characters are literal."""
        return "".join(
            re.escape(value.text) if part.quoted else glob(value.text)
            for part in word.parts
            if (value := self._value(part, word.line))
        )


class _Fields:
    """Collects the words into which one word is split."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.fields: list[Argument] = []
        self.open: list[Argument] = []
        self.begun = False

    def add(self, value: Argument, quoted: bool) -> None:
        self.open.append(value)
        self.begun |= quoted or bool(value.text)

    def close(self) -> None:
        if self.begun:
            line = self.open[0].line if len(self.open) == 1 else self.line
            self.fields.append(_joined("", self.open, line))
        self.open, self.begun = [], False

    def blank_separated(self, value: Argument) -> None:
        if value.text[:1].isspace():
            self.close()
        for position, text in enumerate(_PIECES.findall(value.text)):
            if position:
                self.close()
            missing = tuple(
                name
                for name in value.missing
                if ("$" in text and name in text) or name not in value.text
            )
            self.add(replace(value, text=text, missing=missing), quoted=True)
        if value.text[-1:].isspace():
            self.close()

    def several(self, values: list[Argument], *, splits: bool) -> None:
        for position, value in enumerate(values):
            if position:
                self.close()
            if splits:
                self.blank_separated(value)
            else:
                self.add(value, quoted=not splits)

    def finish(self) -> list[Argument]:
        self.close()
        return self.fields


def _joined(separator: str, values: list[Argument], line: int) -> Argument:
    return Argument(
        separator.join(value.text for value in values),
        line,
        tuple(dict.fromkeys(name for value in values for name in value.missing)),
        tuple(dict.fromkeys(name for value in values for name in value.conditional)),
    )
