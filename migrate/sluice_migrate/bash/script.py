"""Reads a script up to the commands that it would start, without running any of them.

An unset variable keeps its name (`${BASE_DIR}/data`) and is listed in `missing`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sluice_migrate.bash import parser as ast
from sluice_migrate.bash.conditions import Operand, Truth, holds
from sluice_migrate.bash.control_flow import ControlFlow, JumpError
from sluice_migrate.bash.expansion import Argument, Variables
from sluice_migrate.bash.lexer import PartKind, Word
from sluice_migrate.bash.programs import change_directory, output, succeeds
from sluice_migrate.bash.variables import ASSIGNED, Remark, StopReadingError

# Words before a command that do not change what it starts.
_BEFORE = ("exec", "nohup", "command", "builtin", "sudo")
# Builtins whose arguments are assignments.
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
# Nested function calls, sourced files and command substitutions.
_DEEPEST = 30
# `missing` of the output of a program that is not known.
_UNKNOWN = ("",)

__all__ = ["Argument", "Remark", "Script", "ScriptCommand", "read_script"]


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """A command that the script starts; `sure` is False under a condition that is not known."""

    words: tuple[Argument, ...]
    sure: bool = True

    @property
    def line(self) -> int:
        """The line of its first word."""
        return self.words[0].line


@dataclass
class Script(ControlFlow):
    """A script with the commands that it starts.

    open: reads a file that it sources; None if there is no such file. sourced: sourced files that
    could not be read.
    """

    commands: list[ScriptCommand] = field(default_factory=list)
    sourced: list[str] = field(default_factory=list)
    open: Callable[[str], str | None] = lambda path: None
    depth: int = 0

    @property
    def unknown_arrays(self) -> list[str]:
        """Arrays that are used but never set."""
        return self.variables.unknown_arrays

    def simple(self, words: list[Word]) -> Truth:
        """Read assignments, a builtin, a function call or a program."""
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
            return self._with_assignments(before, arguments)
        return self._start(arguments)

    def _with_assignments(
        self, before: list[tuple[re.Match[str], Word]], arguments: list[Argument]
    ) -> Truth:
        """Read `NAME=value source file`, whose variables are set for this command alone."""
        outer = dict(self.variables.values)
        self._assign_all(before)
        truth = self._start(arguments)
        for match, _ in before:
            self.variables.values.pop(match[1], None)
            if match[1] in outer:
                self.variables.values[match[1]] = outer[match[1]]
        return truth

    def _assign_all(self, assignments: list[tuple[re.Match[str], Word]]) -> Truth:
        truth: Truth = True
        for match, word in assignments:
            self.assign(match, word)
            # The status of an assignment is that of its command substitution.
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
        """Start a builtin, a function of the script, or a program."""
        name, rest = arguments[0].text, arguments[1:]
        if name in self.functions and self.depth < _DEEPEST:
            return self._call(self.functions[name], rest)
        if name not in _BUILTINS:
            return self._program(arguments)
        return _BUILTINS[name](self, arguments)

    def _program(self, arguments: list[Argument]) -> Truth:
        truth = succeeds(arguments)
        if self.captured is None:
            self.commands.append(ScriptCommand(tuple(arguments), sure=self.undecided == 0))
            return truth
        text = output(arguments, self.variables)
        if text is not None and not self.undecided:
            self.captured.append(text)
            return True
        if truth is not False:
            self.captured.append(Argument("", arguments[0].line, _UNKNOWN))
        return truth

    def _call(self, body: ast.Body, arguments: list[Argument]) -> Truth:
        before = self.variables.arguments
        self.variables.arguments = arguments
        self.shadowed.append({})
        self.depth += 1
        try:
            return self.run(body)
        except JumpError:
            return None
        finally:
            self.depth -= 1
            self.variables.arguments = before
            for name, value in self.shadowed.pop().items():
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
        except JumpError:
            return None
        finally:
            self.depth -= 1
            self.variables.source = before

    def _exit(self, arguments: list[Argument]) -> Truth:
        """End the script, but read on after a failure: it often only checks its arguments."""
        code = arguments[1].text if len(arguments) > 1 else "0"
        if self.undecided:
            return None
        if code == "0":
            raise StopReadingError
        why = "the script ends here without further arguments; read on nevertheless (see --var)"
        self.remark(arguments[0].line, f"exit {code}", why)
        return None

    def output_of(self, text: str, line: int) -> Argument | None:
        """Return the output of `$(text)`; None if it is not known."""
        outer, self.captured = self.captured, []
        functions, undecided = dict(self.functions), self.undecided
        self.depth, self.undecided = self.depth + 1, 0
        try:
            if self.depth > _DEEPEST:
                return None
            body = ast.parse(text, line)
            self.subshell(body)
            unknown = any(value.missing == _UNKNOWN for value in self.captured)
            piped = any(len(pipeline.commands) > 1 for pipeline in body)
            return None if unknown or piped or not self.captured else _lines(self.captured, line)
        except (StopReadingError, JumpError):
            return None
        finally:
            self.depth -= 1
            self.captured, self.functions, self.undecided = outer, functions, undecided


def _lines(values: list[Argument], line: int) -> Argument:
    return Argument(
        "\n".join(value.text.rstrip("\n") for value in values).rstrip("\n"),
        line,
        tuple(name for value in values for name in value.missing),
        tuple(name for value in values for name in value.conditional),
    )


def _jump(script: Script, arguments: list[Argument]) -> Truth:
    if not script.undecided:
        raise JumpError(arguments[0].text)
    return None


def _set_arguments(script: Script, arguments: list[Argument]) -> Truth:
    if len(arguments) > 1 and arguments[1].text == "--":
        script.variables.arguments = arguments[2:]
    return True


def _shift(script: Script, arguments: list[Argument]) -> Truth:
    del script.variables.arguments[:1]
    return True


def _unset(script: Script, arguments: list[Argument]) -> Truth:
    script.forget(arguments[1:])
    return True


def _read_input(script: Script, arguments: list[Argument]) -> Truth:
    """Read `read` and the like: the input is not known."""
    for value in arguments[1:]:
        if value.text.isidentifier():
            script.unknown(value)
    return None


def _printf(script: Script, arguments: list[Argument]) -> Truth:
    if len(arguments) < 2 or arguments[1].text != "-v":
        return script._program(arguments)
    script.printf_to_variable(arguments[1:])
    return True


def _eval(script: Script, arguments: list[Argument]) -> Truth:
    script.remark(arguments[0].line, "eval", "is not read here; import with --exact to run it")
    return None


def _change_directory(script: Script, arguments: list[Argument]) -> Truth:
    paths = [value for value in arguments[1:] if value.text != "--"]
    if paths:
        change_directory(paths[0], script.variables)
    return True if script.captured is not None else None


def _no_effect(script: Script, arguments: list[Argument]) -> Truth:
    return arguments[0].text != "false"


_BUILTINS: dict[str, Callable[[Script, list[Argument]], Truth]] = {
    "source": lambda script, arguments: script._source(arguments),
    ".": lambda script, arguments: script._source(arguments),
    "exit": lambda script, arguments: script._exit(arguments),
    "cd": _change_directory,
    "set": _set_arguments,
    "shift": _shift,
    "unset": _unset,
    "printf": _printf,
    "eval": _eval,
    **dict.fromkeys(("break", "continue", "return"), _jump),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts"), _read_input),
    **dict.fromkeys((":", "true", "false", "shopt", "trap", "ulimit", "wait", "umask"), _no_effect),
}


def read_script(
    text: str,
    environment: Mapping[str, str] | None = None,
    source: str = "",
    folder: Argument | None = None,
    open_file: Callable[[str], str | None] = lambda path: None,
) -> Script:
    """Read the commands of a script.

    Parameters
    ----------
    text
        The script.
    environment
        Variables that win over those of the script.
    source
        Path of the script; "" for a command line.
    folder
        The folder in which it starts, if known. PWD in `environment` wins.
    open_file
        Returns the text of a file that the script sources, or None.

    Raises
    ------
    ScriptError
        If the text is not valid bash.

    """
    outside = dict(environment or {})
    if (start := outside.pop("PWD", None)) is not None:
        folder = Argument(start, 0)
    variables = Variables(environment=outside, source=source)
    variables.values["PWD"] = folder or Argument("${PWD}", 0, ("PWD",))
    script = Script(variables, open=open_file)
    with contextlib.suppress(StopReadingError, JumpError):
        script.run(ast.parse(text))
    return script
