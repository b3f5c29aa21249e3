"""The order in which a script's commands are read: lists, conditions, loops, subshells.

A condition that the script's own values decide is decided. Of one that only the machine could
decide all branches are read, and what they set is conditional.
"""

from __future__ import annotations

import abc
import re
from dataclasses import dataclass, field, replace

from sluice_migrate.bash import parser as ast
from sluice_migrate.bash.conditions import Operand, Truth, holds, negation
from sluice_migrate.bash.expansion import Argument
from sluice_migrate.bash.lexer import Operator, Word
from sluice_migrate.bash.variables import EndError, Memory

_MOST_STEPS = 20_000


class LeaveError(Exception):
    """`break`, `continue` or `return`."""

    def __init__(self, what: str) -> None:
        self.what = what


@dataclass
class Control(Memory):
    functions: dict[str, ast.Body] = field(default_factory=dict)
    steps: int = 0
    says: list[Argument] | None = None
    """Output of a command substitution that is being read."""

    @abc.abstractmethod
    def simple(self, words: list[Word]) -> Truth:
        """Read a command without any structure, and say how it ends."""

    def run(self, body: ast.Body) -> Truth:
        truth: Truth = True
        for pipeline in body:
            before = pipeline.before
            if (before == "&&" and truth is False) or (before == "||" and truth is True):
                continue
            unsure = bool(before) and truth is None
            self.doubts += unsure
            after = self._pipeline(pipeline)
            self.doubts -= unsure
            truth = None if unsure and after is not truth else after
        return truth

    def _pipeline(self, pipeline: ast.Pipeline) -> Truth:
        truth: Truth = True
        for command in pipeline.commands:
            truth = self._command(command)
        if len(pipeline.commands) > 1 and self.says is not None:
            truth = None
        return negation(truth) if pipeline.negated else truth

    def _command(self, command: ast.Command) -> Truth:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            self.remark(0, "a loop", "is too long to be read here")
            raise EndError
        match command:
            case ast.Simple(words):
                return self.simple(words)
            case ast.Test(words, _):
                return holds(self._operands(words))
            case ast.Arithmetic(text, line):
                return self.arithmetic(text, line)
            case ast.Group(body, subshell):
                return self.subshell(body) if subshell else self.run(body)
            case ast.If():
                return self._if(command)
            case ast.Case():
                return self._case(command)
            case ast.Function(name, body):
                self.functions[name] = body
                return True
            case _:
                return self._loop(command)

    def _if(self, command: ast.If) -> Truth:
        doubts = 0
        truth: Truth = True
        for condition, body in command.branches:
            holds_ = self.run(condition)
            if holds_ is False:
                continue
            unsure = holds_ is None
            doubts += unsure
            self.doubts += unsure
            truth = self.run(body)
            if holds_:
                break
        else:
            truth = self.run(command.otherwise)
        self.doubts -= doubts
        return None if doubts else truth

    def _case(self, command: ast.Case) -> Truth:
        expander = self.lenient
        subject = expander.joined(command.subject)
        truth: Truth = True
        for patterns, body in command.arms:
            if subject.missing:
                self.doubts += 1
                self.run(body)
                self.doubts -= 1
                truth = None
            elif any(re.fullmatch(expander.pattern(p), subject.text, re.DOTALL) for p in patterns):
                return self.run(body)
        return truth

    def _loop(self, command: ast.For | ast.Count | ast.While) -> Truth:
        try:
            match command:
                case ast.For():
                    self._for(command)
                case ast.Count():
                    self._count(command)
                case ast.While():
                    self._while(command)
        except LeaveError as leaves:
            if leaves.what == "return":
                raise
        return True

    def _body(self, body: ast.Body) -> None:
        try:
            self.run(body)
        except LeaveError as leaves:
            if leaves.what != "continue":
                raise

    def _for(self, command: ast.For) -> None:
        expander = self.lenient
        values = (
            list(self.variables.arguments)
            if command.words is None
            else [value for word in command.words for value in expander.words(word)]
        )
        for value in values:
            self.set(command.name, value)
            self._body(command.body)

    def _count(self, command: ast.Count) -> None:
        start, condition, step = command.header
        self.arithmetic(start, command.line)
        while truth := self.arithmetic(condition or "1", command.line):
            self._body(command.body)
            self.arithmetic(step, command.line)
        if truth is None:
            self._doubtfully(command.body)

    def _while(self, command: ast.While) -> None:
        while True:
            truth = self.run(command.condition)
            truth = negation(truth) if command.until else truth
            if truth is None:
                self._doubtfully(command.body)
            if not truth:
                return
            self._body(command.body)

    def _doubtfully(self, body: ast.Body) -> None:
        self.doubts += 1
        self._body(body)
        self.doubts -= 1

    def subshell(self, body: ast.Body) -> Truth:
        kept = self.variables
        self.variables = replace(kept, values=dict(kept.values), arrays=dict(kept.arrays))
        try:
            return self.run(body)
        finally:
            self.variables = kept

    def _operands(self, words: list[Word | Operator]) -> list[Operand]:
        """The words of `[[ ]]`: not split, and patterns on the right."""
        operands = []
        for word in words:
            if isinstance(word, Operator):
                operands.append(Operand(word.text))
                continue
            value = self.lenient.joined(word)
            pattern = self.lenient.pattern(word)
            is_set = self.variables.get(value.text, word.line) is not None
            operands.append(Operand(value.text, not value.missing, pattern, is_set))
        return operands
