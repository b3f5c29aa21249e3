"""A Python that runs the model's programs, confined as the reward `code` confines them.

Later calls of an episode see what earlier programs have defined, because these are run again
before, in a new process, without their output. So a session holds no process between two calls, and
a program that hangs or is killed costs only itself. Random numbers come from a fixed seed, and are
the same each time.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sluice.rewards.sandbox import ProgramRun
from sluice_rollout.toolbox.base import definition_of, shortened
from sluice_rollout.toolbox.sandboxes import Sandboxes, half_of_the_cores

_PROGRAM_BYTES = 1 << 20
_RUNNER = """
import ast, contextlib, io, json, os, random, sys, traceback
random.seed(0)
def _run(_text, _names, _label):
    _tree = ast.parse(_text, _label)
    _last = None
    if _tree.body and isinstance(_tree.body[-1], ast.Expr):
        _last = ast.Expression(_tree.body.pop().value)
    exec(compile(_tree, _label, "exec"), _names)
    if _last is not None:
        _value = eval(compile(_last, _label, "eval"), _names)
        if _value is not None:
            print(repr(_value))
def _play(_programs):
    _names = {"__name__": "__main__"}
    for _number, _text in enumerate(_programs, 1):
        _quiet = _number < len(_programs)
        _out = io.StringIO()
        _err = _out if _quiet else sys.stderr
        with contextlib.redirect_stdout(_out if _quiet else sys.stdout), \\
                contextlib.redirect_stderr(_err):
            try:
                _run(_text, _names, f"<program {_number}>")
            except SystemExit:
                pass
            except BaseException as _error:
                if not _quiet:
                    _skip = _error.__traceback__.tb_next
                    print("".join(traceback.format_exception(type(_error), _error, _skip)), end="")
_play(json.loads(PROGRAMS))
print(END, end="")
"""


@dataclass(slots=True)
class Python:
    """The tool `python`."""

    name: str = "python"
    # Limits of a program: time, and bytes of memory.
    seconds: float = 5.0
    memory: int = 1 << 30
    # Most characters of an answer.
    longest: int = 4096
    # Most programs of an episode.
    most_programs: int = 16
    # Programs that run at a time in this worker.
    sandboxes: int = field(default_factory=half_of_the_cores)
    definition: dict[str, Any] = field(init=False)
    _sandboxes: Sandboxes = field(init=False)

    def __post_init__(self) -> None:
        text = "Run a Python program; the answer is what it prints, and the value of its last line."
        self.definition = definition_of(self.name, text, code="The program.")
        self._sandboxes = Sandboxes(self.sandboxes)

    def session(self) -> Callable[..., str]:
        """Return a session, whose programs share their names."""
        return Session(self)

    def run(self, programs: list[str], seconds: float) -> ProgramRun:
        """Run programs one after another; return the output of the last.

        Raises ToolUnavailableError if no sandbox is available.
        """
        end = secrets.token_hex(8)
        ran = self._sandboxes.run(
            source=f"END, PROGRAMS = {end!r}, {json.dumps(programs)!r}\n{_RUNNER}",
            input="",
            seconds=seconds,
            memory=self.memory,
            cpu_seconds=math.ceil(seconds) + 1,
        )
        if ran.status == "ok" and not ran.output.endswith(end):
            return replace(ran, status="error", error="it ended its process")
        return replace(ran, output=ran.output.removesuffix(end))

    def close(self) -> None:
        """End the sandboxes that are free."""
        self._sandboxes.close()


@dataclass(slots=True)
class Session:
    """The programs of an episode."""

    python: Python
    programs: list[str] = field(default_factory=list)
    # Time that the earlier programs took together.
    spent: float = 0.0
    calls: int = 0
    # Calls of one turn of the model run one after another.
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, code: str) -> str:
        """Return a program's output, or why there is no output. Raises ToolUnavailableError."""
        with self._turn:
            return self._run(code)

    def _run(self, code: str) -> str:
        tool = self.python
        self.calls += 1
        if self.calls > tool.most_programs:
            return f"error: no more programs: an episode has {tool.most_programs}"
        if not isinstance(code, str) or len(code) > _PROGRAM_BYTES or "\0" in code:
            return f"error: a program is a text of at most {_PROGRAM_BYTES} characters"
        start = time.monotonic()
        ran = tool.run([*self.programs, code], self.spent + tool.seconds)
        if ran.status == "ok":
            self.programs.append(code)
            self.spent = time.monotonic() - start
        return shortened(self._answer(ran), tool.longest)

    def _answer(self, ran: ProgramRun) -> str:
        if ran.status == "ok":
            return ran.output + ran.error
        reasons = {
            "timeout": f"no end after {self.python.seconds:g} s",
            "output": "it printed too much",
            "limit": ran.error,
        }
        reason = reasons.get(ran.status) or f"it was ended: {ran.error or ran.status}"
        return f"{ran.output}error: {reason}. What this program did is not kept."
