"""The state of a script while it is read: variables, and the effect of assignments."""

from __future__ import annotations

import abc
import re
from dataclasses import dataclass, field, replace
from typing import NoReturn

from sluice_migrate.bash.conditions import Truth
from sluice_migrate.bash.expansion import Argument, Expander, Variables
from sluice_migrate.bash.lexer import Part, PartKind, Word
from sluice_migrate.bash.programs import output

# Limits on a text and an array: a loop that doubles a value must not fill the memory.
_LONGEST, _MOST_VALUES = 1 << 18, 10_000
# `NAME=`, `NAME+=` and `NAME[index]=`.
ASSIGNED = re.compile(r"^([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=")


class StopReadingError(Exception):
    """Reading ends: the script exits, or exceeds a limit of steps or sizes."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A difference between what was read and what bash would run."""

    line: int
    subject: str
    text: str


@dataclass
class ScriptState(abc.ABC):
    """Variables, remarks, and the context of the command that is read.

    unset: unset variables that were dropped as words, with their lines. undecided: number of
    unknown conditions around the current command. shadowed: values that the `local` of each
    running function hides.
    """

    variables: Variables = field(default_factory=Variables)
    remarks: list[Remark] = field(default_factory=list)
    unset: dict[str, int] = field(default_factory=dict)
    undecided: int = 0
    shadowed: list[dict[str, Argument | None]] = field(default_factory=list)

    @abc.abstractmethod
    def output_of(self, text: str, line: int) -> Argument | None:
        """Return the output of `$(text)`; None if it is not known."""

    @property
    def expander(self) -> Expander:
        """Expands the words of commands."""
        return Expander(self.variables, self.output_of)

    @property
    def lenient(self) -> Expander:
        """Expands the words of conditions, in which an unset variable is empty."""
        expander = self.expander
        expander.lenient = True
        return expander

    def arithmetic(self, text: str, line: int) -> Truth:
        """Evaluate `((text))`."""
        try:
            value, missing = self.lenient.number(text, line)
        except (ValueError, ArithmeticError):
            return None
        return None if missing else value != 0

    def expand(self, words: list[Word]) -> list[Argument]:
        """Expand the words of a command.

        Bash drops an unset `$NAME`. It is kept after an option: there it is a missing value.
        """
        arguments: list[Argument] = []
        for word in words:
            after_option = arguments and re.fullmatch("--?[A-Za-z][^=]*", arguments[-1].text)
            if not self.expander.is_unset(word) or after_option:
                arguments += self.expander.words(word)
            elif word.parts[0].text.isidentifier():
                self.unset[word.parts[0].text] = word.line
        return arguments

    def declare(self, name: str, words: list[Word]) -> Truth:
        """Read `export`, `declare`, `local` and the like."""
        for word in words:
            match = ASSIGNED.match(word.literal)
            plain = match[1] if match else word.plain
            if name == "local" and self.shadowed and plain.isidentifier():
                self.shadowed[-1].setdefault(plain, self.variables.values.get(plain))
                self.variables.values.pop(plain, None)
            if match:
                self.assign(match, word)
        return True

    def assign(self, match: re.Match[str], word: Word) -> None:
        """Read an assignment; `match` is ASSIGNED's."""
        name, index, adds = match[1], match[2], bool(match[3])
        if word.array is not None:
            values = [self._marked_conditional(name, value) for value in self.expand(word.array)]
            old = self.variables.arrays.get(name, []) if adds else []
            if len(old) + len(values) > _MOST_VALUES:
                self._give_up(name, word.line)
            self.variables.arrays[name] = old + values
            self.variables.values.pop(name, None)
            return
        value = self.expander.joined(_without(word, match.end()))
        if index is not None:
            self._assign_element(name, index, value)
            return
        before = self.variables.get(name, word.line)
        if adds and before is not None:
            value = replace(
                value,
                text=before.text + value.text,
                missing=before.missing + value.missing,
                conditional=before.conditional + value.conditional,
            )
        self.set(name, value)

    def set(self, name: str, value: Argument) -> None:
        """Set a variable, unless --var gives it."""
        if name in self.variables.environment:
            return
        if len(value.text) > _LONGEST:
            self._give_up(name, value.line)
        self.variables.values[name] = self._marked_conditional(name, value)

    def _give_up(self, name: str, line: int) -> NoReturn:
        """Stop reading, because a loop that doubles a text would fill the memory."""
        self.remark(line, f"${name}", "is too long: the script is not read any further")
        raise StopReadingError

    def _marked_conditional(self, name: str, value: Argument) -> Argument:
        return replace(value, conditional=(*value.conditional, name)) if self.undecided else value

    def _assign_element(self, name: str, index: str, value: Argument) -> None:
        values = list(self.variables.arrays.get(name, []))
        at = int(index) if index.isdigit() else -1
        if not 0 <= at <= len(values):
            self.remark(
                value.line, f"{name}[{index}]", "is not read here; import with --exact to run it"
            )
            return
        values[at : at + 1] = [self._marked_conditional(name, value)]
        self.variables.arrays[name] = values

    def forget(self, names: list[Argument]) -> None:
        """Unset variables."""
        for value in names:
            self.variables.values.pop(value.text, None)
            self.variables.arrays.pop(value.text, None)

    def unknown(self, name: Argument) -> None:
        """Set a variable to an unknown value."""
        unknown = Argument(f"${{{name.text}}}", name.line, (name.text,))
        self.variables.arrays.pop(name.text, None)
        self.set(name.text, unknown)

    def printf_to_variable(self, rest: list[Argument]) -> None:
        """Read `printf -v NAME ...`."""
        if len(rest) > 2:
            text = output([replace(rest[0], text="printf"), *rest[2:]], self.variables)
            unknown = Argument(f"${{{rest[1].text}}}", rest[1].line, (rest[1].text,))
            self.set(rest[1].text, text or unknown)

    def remark(self, line: int, subject: str, text: str) -> None:
        """Add a remark, once."""
        remark = Remark(line, subject, text)
        if remark not in self.remarks:
            self.remarks.append(remark)


def _without(word: Word, width: int) -> Word:
    """Remove the first characters of a word, which are literal."""
    parts: list[Part] = []
    for part in word.parts:
        cut = min(width, len(part.text)) if part.kind is PartKind.TEXT else 0
        width -= cut
        parts.append(replace(part, text=part.text[cut:]) if cut else part)
    while len(parts) > 1 and not parts[0].text and parts[0].kind is PartKind.TEXT:
        parts.pop(0)  # so that a `~` after the `=` comes first
    return Word(word.line, parts)
