"""Commands of a script -> what it would start, with variables filled in from its own assignments.

Nothing is executed. What is not set keeps its name (`${BASE_DIR}/data`) and is listed in `missing`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sluice_migrate.bash import parser as ast
from sluice_migrate.bash.conditions import Operand, Truth, holds
from sluice_migrate.bash.control_flow import Control, LeaveError
from sluice_migrate.bash.expansion import Argument, Variables
from sluice_migrate.bash.lexer import PartKind, Word
from sluice_migrate.bash.programs import ends_well, enter, output
from sluice_migrate.bash.variables import ASSIGNED, EndError, Remark

_BEFORE = ("exec", "nohup", "command", "builtin", "sudo")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_DEEPEST = 30
_UNKNOWN = ("",)
"""Stands for the missing output of a program that is not known here."""

__all__ = ["Argument", "Remark", "Script", "ScriptCommand", "read_script"]


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    words: tuple[Argument, ...]
    sure: bool = True
    """False under a condition that is not known."""

    @property
    def line(self) -> int:
        return self.words[0].line


@dataclass
class Script(Control):
    """The commands of a script, and the settings that it makes.

    open: the text of a file that it sources, by its path; None where there is none. sourced: files
    that it would read, and that could not be read here.
    """

    commands: list[ScriptCommand] = field(default_factory=list)
    sourced: list[str] = field(default_factory=list)
    open: Callable[[str], str | None] = lambda path: None
    depth: int = 0

    @property
    def unknown_arrays(self) -> list[str]:
        return self.variables.unknown_arrays

    def simple(self, words: list[Word]) -> Truth:
        words = list(words)
        before: list[tuple[re.Match[str], Word]] = []
        while words and (match := ASSIGNED.match(words[0].literal)):
            before.append((match, words.pop(0)))
        if not words:
            return self._assign_all(before)
        name = words[0].plain
        if name in _DECLARES:
            return self.declare(name, words[1:])
        if name in ("[", "test"):
            return self._test(words[1 : -1 if name == "[" else None])
        arguments = self.expand(words)
        while arguments and arguments[0].text in _BEFORE:
            arguments.pop(0)
        if not arguments:
            return True
        if before and arguments[0].text in ("source", ".", *self.functions):
            return self._with(before, arguments)
        return self._start(arguments)

    def _with(self, before: list[tuple[re.Match[str], Word]], arguments: list[Argument]) -> Truth:
        """`NAME=value source file`: the variables hold for the one command."""
        kept = dict(self.variables.values)
        self._assign_all(before)
        truth = self._start(arguments)
        for match, _ in before:
            self.variables.values.pop(match[1], None)
            if match[1] in kept:
                self.variables.values[match[1]] = kept[match[1]]
        return truth

    def _assign_all(self, assignments: list[tuple[re.Match[str], Word]]) -> Truth:
        truth: Truth = True
        for match, word in assignments:
            self.assign(match, word)
            substitutes = any(part.kind is PartKind.COMMAND for part in word.parts)
            truth = None if substitutes else truth
        return truth

    def _test(self, words: list[Word]) -> Truth:
        operands = []
        for word in words:
            for value in self.lenient.words(word):
                is_set = self.variables.get(value.text, word.line) is not None
                operands.append(Operand(value.text, not value.missing, None, is_set))
        return holds(operands)

    def _start(self, arguments: list[Argument]) -> Truth:
        """A builtin, a function of the script, or a program."""
        name, rest = arguments[0].text, arguments[1:]
        if name in self.functions and self.depth < _DEEPEST:
            return self._call(self.functions[name], rest)
        if name not in _BUILTINS:
            return self._program(arguments)
        return _BUILTINS[name](self, arguments)

    def _program(self, arguments: list[Argument]) -> Truth:
        truth = ends_well(arguments)
        if self.says is None:
            self.commands.append(ScriptCommand(tuple(arguments), sure=self.doubts == 0))
            return truth
        said = output(arguments, self.variables)
        if said is not None and not self.doubts:
            self.says.append(said)
            return True
        if truth is not False:
            self.says.append(Argument("", arguments[0].line, _UNKNOWN))
        return truth

    def _call(self, body: ast.Body, arguments: list[Argument]) -> Truth:
        before = self.variables.arguments
        self.variables.arguments = arguments
        self.hidden.append({})
        self.depth += 1
        try:
            return self.run(body)
        except LeaveError:
            return None
        finally:
            self.depth -= 1
            self.variables.arguments = before
            for name, value in self.hidden.pop().items():
                self.variables.values.pop(name, None)
                if value is not None:
                    self.variables.values[name] = value

    def _source(self, arguments: list[Argument]) -> Truth:
        if len(arguments) < 2:
            return None
        path = arguments[1]
        text = None if path.missing else self.open(path.text)
        if text is None or self.depth >= _DEEPEST:
            self.sourced.append(path.text)
            return None
        before, self.variables.source = self.variables.source, path.text
        self.depth += 1
        try:
            return self.run(ast.parse(text))
        except LeaveError:
            return None
        finally:
            self.depth -= 1
            self.variables.source = before

    def _exit(self, arguments: list[Argument]) -> Truth:
        """A failure is what somebody who imports does not want: the rest is read all the same."""
        code = arguments[1].text if len(arguments) > 1 else "0"
        if self.doubts:
            return None
        if code == "0":
            raise EndError
        why = "ends the script where it is given nothing more; read on all the same (--var)"
        self.remark(arguments[0].line, f"exit {code}", why)
        return None

    def output_of(self, text: str, line: int) -> Argument | None:
        """The output of `$(text)`; None where only a shell could tell."""
        outer, self.says = self.says, []
        functions, doubts = dict(self.functions), self.doubts
        self.depth, self.doubts = self.depth + 1, 0
        try:
            if self.depth > _DEEPEST:
                return None
            body = ast.parse(text, line)
            self.subshell(body)
            unknown = any(value.missing == _UNKNOWN for value in self.says)
            piped = any(len(pipeline.commands) > 1 for pipeline in body)
            return None if unknown or piped or not self.says else _lines(self.says, line)
        except (EndError, LeaveError):
            return None
        finally:
            self.depth -= 1
            self.says, self.functions, self.doubts = outer, functions, doubts


def _lines(values: list[Argument], line: int) -> Argument:
    return Argument(
        "\n".join(value.text.rstrip("\n") for value in values).rstrip("\n"),
        line,
        tuple(name for value in values for name in value.missing),
        tuple(name for value in values for name in value.conditional),
    )


def _leave(script: Script, arguments: list[Argument]) -> Truth:
    if not script.doubts:
        raise LeaveError(arguments[0].text)
    return None


def _arguments(script: Script, arguments: list[Argument]) -> Truth:
    if len(arguments) > 1 and arguments[1].text == "--":
        script.variables.arguments = arguments[2:]
    return True


def _shift(script: Script, arguments: list[Argument]) -> Truth:
    del script.variables.arguments[:1]
    return True


def _names(script: Script, arguments: list[Argument]) -> Truth:
    script.forget(arguments[1:])
    return True


def _read(script: Script, arguments: list[Argument]) -> Truth:
    """`read` and its kind: what comes in is not known here."""
    for value in arguments[1:]:
        if value.text.isidentifier():
            script.unknown(value)
    return None


def _printf(script: Script, arguments: list[Argument]) -> Truth:
    if len(arguments) < 2 or arguments[1].text != "-v":
        return script._program(arguments)
    script.print_into(arguments[1:])
    return True


def _eval(script: Script, arguments: list[Argument]) -> Truth:
    script.remark(arguments[0].line, "eval", "is not read; --exact runs it")
    return None


def _enter(script: Script, arguments: list[Argument]) -> Truth:
    paths = [value for value in arguments[1:] if value.text != "--"]
    if paths:
        enter(paths[0], script.variables)
    return True if script.says is not None else None


def _nothing(script: Script, arguments: list[Argument]) -> Truth:
    return arguments[0].text != "false"


_BUILTINS: dict[str, Callable[[Script, list[Argument]], Truth]] = {
    "source": lambda script, arguments: script._source(arguments),
    ".": lambda script, arguments: script._source(arguments),
    "exit": lambda script, arguments: script._exit(arguments),
    "cd": _enter,
    "set": _arguments,
    "shift": _shift,
    "unset": _names,
    "printf": _printf,
    "eval": _eval,
    **dict.fromkeys(("break", "continue", "return"), _leave),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts"), _read),
    **dict.fromkeys((":", "true", "false", "shopt", "trap", "ulimit", "wait", "umask"), _nothing),
}


def read_script(
    text: str,
    environment: Mapping[str, str] | None = None,
    source: str = "",
    here: Argument | None = None,
    open_file: Callable[[str], str | None] = lambda path: None,
) -> Script:
    """The commands of a script. Raises ScriptError.

    environment: its variables go before the script's own. source: the script's path, where it has
    one. here: the folder that it starts in, if it is known; PWD of the environment goes before it.
    open_file: the text of a file that it sources, or None.
    """
    outside = dict(environment or {})
    if (start := outside.pop("PWD", None)) is not None:
        here = Argument(start, 0)
    variables = Variables(environment=outside, source=source)
    variables.values["PWD"] = here or Argument("${PWD}", 0, ("PWD",))
    script = Script(variables, open=open_file)
    with contextlib.suppress(EndError, LeaveError):
        script.run(ast.parse(text))
    return script
