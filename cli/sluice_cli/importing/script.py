"""Statements of a script -> the commands that it would run,
with variables filled in from its own assignments.

Nothing is executed. All branches of conditions are read, one after the other; a variable that only
some branch sets is known as such. What is not set keeps its name (`${BASE_DIR}/data`) and is listed
in `missing`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sluice_cli.importing.shell import Part, PartKind, Statement, Word, parse

_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)(\+?)=")
_OPENING = {"if", "for", "while", "until", "case"}
_CLOSING = {"fi", "done", "esac"}
_SKIPPED = {
    "then",
    "else",
    "elif",
    "do",
    "{",
    "}",
    "!",
    "time",
    "export",
    "declare",
    "local",
    "readonly",
    "exec",
    "nohup",
}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: base ** min(exponent, 64),
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One word of a command. missing: what it would take to know it. doubtful: variables that a
    condition sets.
    """

    text: str
    line: int
    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    words: tuple[Argument, ...]

    @property
    def line(self) -> int:
        return self.words[0].line


@dataclass(slots=True)
class Script:
    """The settings that a script makes.

    sourced: files that it would read, and that are not read here.
    """

    variables: dict[str, Argument] = field(default_factory=dict)
    arrays: dict[str, list[Argument]] = field(default_factory=dict)
    commands: list[ScriptCommand] = field(default_factory=list)
    sourced: list[str] = field(default_factory=list)
    unknown_arrays: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    _depth: int = 0

    def read(self, statement: Statement) -> None:
        words = list(statement)
        while words and (words[0].literal in _SKIPPED | _OPENING | _CLOSING):
            self._depth += (words[0].literal in _OPENING) - (words[0].literal in _CLOSING)
            words.pop(0)
        while words and (match := _ASSIGNED.match(words[0].literal)):
            self._assign(match, words.pop(0))
        arguments = [argument for word in words for argument in self.expand(word)]
        if not arguments:
            return
        if arguments[0].text in ("source", ".") and len(arguments) > 1:
            self.sourced.append(arguments[1].text)
        else:
            self.commands.append(ScriptCommand(tuple(arguments)))

    def _assign(self, match: re.Match[str], word: Word) -> None:
        name, adds = match[1], bool(match[2])
        if word.array is not None:
            values = [argument for entry in word.array for argument in self.expand(entry)]
            self.arrays[name] = (self.arrays.get(name, []) if adds else []) + values
            return
        if name in self.environment:  # the user knows better
            return
        value = self._joined(_without(word, match.end()))
        if adds and name in self.variables:
            value = replace(value, text=self.variables[name].text + value.text)
        self.variables[name] = (
            replace(value, doubtful=(*value.doubtful, name)) if self._depth > 0 else value
        )

    def expand(self, word: Word) -> list[Argument]:
        """The words that a word becomes: arrays give all of theirs,
        unquoted variables are split at blanks.
        """
        if len(word.parts) == 1 or all(
            p.kind is PartKind.ARRAY or (p.quoted and not p.text) for p in word.parts
        ):
            arrays = [part for part in word.parts if part.kind is PartKind.ARRAY]
            if arrays:
                return [argument for part in arrays for argument in self._array(part.text)]
        value = self._joined(word)
        if all(part.quoted or part.kind is PartKind.TEXT for part in word.parts) or value.missing:
            return [value]
        return [replace(value, text=text) for text in value.text.split()]

    def _array(self, name: str) -> list[Argument]:
        if name in self.arrays:
            return self.arrays[name]
        if name in self.variables:
            return [self.variables[name]]
        if name[0].isalpha() or name[0] == "_":
            self.unknown_arrays.append(name)
        return []

    def _joined(self, word: Word) -> Argument:
        values = [self._value(part, word.line) for part in word.parts]
        return Argument(
            "".join(value.text for value in values),
            word.line,
            tuple(name for value in values for name in value.missing),
            tuple(name for value in values for name in value.doubtful),
        )

    def _value(self, part: Part, line: int) -> Argument:
        match part.kind:
            case PartKind.TEXT:
                return Argument(part.text, line)
            case PartKind.VARIABLE:
                return self._variable(part, line)
            case PartKind.ARRAY:
                values = self._array(part.text)
                return Argument(" ".join(value.text for value in values), line)
            case PartKind.ARITHMETIC:
                return self._arithmetic(part.text, line)
            case PartKind.UNKNOWN:
                return Argument(part.text, line, (part.text,))

    def _variable(self, part: Part, line: int) -> Argument:
        if part.text in self.environment:
            return Argument(self.environment[part.text], line)
        if part.text in self.variables:
            return self.variables[part.text]
        if part.text in self.arrays:
            return next(iter(self.arrays[part.text]), Argument("", line))
        if part.default is not None:
            return self._joined(part.default)
        return Argument(f"${{{part.text}}}", line, (part.text,))

    def _arithmetic(self, text: str, line: int) -> Argument:
        missing: list[str] = []

        def value_of(match: re.Match[str]) -> str:
            value = self._variable(Part(PartKind.VARIABLE, match[1] or match[2]), line)
            missing.extend(value.missing)
            return f"({value.text})"

        filled = re.sub(r"\$\{(\w+)\}|\$?\b([A-Za-z_]\w*)\b", value_of, text)
        try:
            return Argument(str(_evaluate(ast.parse(filled.strip(), mode="eval").body)), line)
        except (SyntaxError, ValueError, ArithmeticError):
            return Argument(f"$(({text}))", line, tuple(missing) or (f"$(({text}))",))


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    raise ValueError("not an expression of whole numbers")


def _without(word: Word, width: int) -> Word:
    """The word without its first characters, all literal."""
    parts: list[Part] = []
    for part in word.parts:
        cut = min(width, len(part.text)) if part.kind is PartKind.TEXT else 0
        width -= cut
        parts.append(replace(part, text=part.text[cut:]))
    return Word(word.line, parts)


def read_script(text: str, environment: Mapping[str, str] | None = None) -> Script:
    """environment: its variables go before the script's own. Raises ScriptError."""
    script = Script(environment=environment or {})
    for statement in parse(text):
        script.read(statement)
    return script
