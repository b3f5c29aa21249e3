"""Runs through a script's lists, conditions, loops and subshells.

A condition on values of the script is evaluated. If only the machine can decide a condition, all
branches are read, and the values that they set are marked as conditional.
"""

from __future__ import annotations

import abc
import re
from dataclasses import dataclass, field, replace

from sluice_migrate.bash import parser as ast
from sluice_migrate.bash.conditions import Operand, Truth, holds, negation
from sluice_migrate.bash.expansion import Argument
from sluice_migrate.bash.lexer import Operator, Word
from sluice_migrate.bash.variables import ScriptState, StopReadingError

# Commands that are read before a loop counts as endless.
_MOST_STEPS = 20_000


class JumpError(Exception):
    """A `break`, `continue` or `return`, named by `keyword`."""

    def __init__(self, keyword: str) -> None:
        self.keyword = keyword


@dataclass
class ControlFlow(ScriptState):
    """Runs commands; `captured` collects the output of the command substitution that is read."""

    functions: dict[str, ast.Body] = field(default_factory=dict)
    steps: int = 0
    captured: list[Argument] | None = None

    @abc.abstractmethod
    def simple(self, words: list[Word]) -> Truth:
        """Run a simple command; returns whether it succeeds."""

    def run(self, body: ast.Body) -> Truth:
        """Run commands; returns whether the last one succeeds."""
        truth: Truth = True
        for pipeline in body:
            before = pipeline.before
            if (before == "&&" and truth is False) or (before == "||" and truth is True):
                continue
            # The command runs only if an unknown one succeeds, or fails.
            is_unknown = bool(before) and truth is None
            self.undecided += is_unknown
            after = self._pipeline(pipeline)
            self.undecided -= is_unknown
            truth = None if is_unknown and after is not truth else after
        return truth

    def _pipeline(self, pipeline: ast.Pipeline) -> Truth:
        truth: Truth = True
        for command in pipeline.commands:
            truth = self._command(command)
        # The output of a pipeline depends on programs that are not run.
        if len(pipeline.commands) > 1 and self.captured is not None:
            truth = None
        return negation(truth) if pipeline.negated else truth

    def _command(self, command: ast.Command) -> Truth:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            self.remark(0, "a loop", "is too long to be read here")
            raise StopReadingError
        match command:
            case ast.SimpleCommand(words):
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
        undecided = 0
        truth: Truth = True
        for condition, body in command.branches:
            condition_holds = self.run(condition)
            if condition_holds is False:
                continue
            is_unknown = condition_holds is None
            undecided += is_unknown
            self.undecided += is_unknown
            truth = self.run(body)
            if condition_holds:
                break
        else:
            truth = self.run(command.otherwise)
        self.undecided -= undecided
        return None if undecided else truth

    def _case(self, command: ast.Case) -> Truth:
        expander = self.lenient
        subject = expander.joined(command.subject)
        truth: Truth = True
        for patterns, body in command.arms:
            if subject.missing:
                self.undecided += 1
                self.run(body)
                self.undecided -= 1
                truth = None
            elif any(re.fullmatch(expander.pattern(p), subject.text, re.DOTALL) for p in patterns):
                return self.run(body)
        return truth

    def _loop(self, command: ast.For | ast.ArithmeticFor | ast.While) -> Truth:
        try:
            match command:
                case ast.For():
                    self._for(command)
                case ast.ArithmeticFor():
                    self._arithmetic_for(command)
                case ast.While():
                    self._while(command)
        except JumpError as jump:
            if jump.keyword == "return":
                raise
        return True

    def _body(self, body: ast.Body) -> None:
        try:
            self.run(body)
        except JumpError as jump:
            if jump.keyword != "continue":
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

    def _arithmetic_for(self, command: ast.ArithmeticFor) -> None:
        start, condition, step = command.header
        self.arithmetic(start, command.line)
        while truth := self.arithmetic(condition or "1", command.line):
            self._body(command.body)
            self.arithmetic(step, command.line)
        if truth is None:
            self._run_undecided(command.body)

    def _while(self, command: ast.While) -> None:
        while True:
            truth = self.run(command.condition)
            truth = negation(truth) if command.until else truth
            if truth is None:
                self._run_undecided(command.body)
            if not truth:
                return
            self._body(command.body)

    def _run_undecided(self, body: ast.Body) -> None:
        self.undecided += 1
        self._body(body)
        self.undecided -= 1

    def subshell(self, body: ast.Body) -> Truth:
        """Run commands whose assignments are lost."""
        outer = self.variables
        self.variables = replace(outer, values=dict(outer.values), arrays=dict(outer.arrays))
        try:
            return self.run(body)
        finally:
            self.variables = outer

    def _operands(self, words: list[Word | Operator]) -> list[Operand]:
        """Expand the words of `[[ ]]`, which are not split, and have patterns on the right."""
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
