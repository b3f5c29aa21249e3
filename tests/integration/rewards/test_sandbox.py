"""Unread programs in the sandbox: what they may do, what they may not, and that trying does no
harm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.api import Reward
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judging.judge import Judge
from sluice.rewards.sandbox import ProgramRun, Sandbox

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


def run(sandbox: Sandbox, source: str, **changes: Any) -> ProgramRun:
    return sandbox.run(
        source=source,
        **{"input": "3 4\n", "seconds": 5.0, "memory": 1 << 30, "cpu_seconds": 6, **changes},
    )


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("a, b = map(int, input().split()); print(a + b)", "7"),
        ("import sys; print(sum(map(int, sys.stdin.read().split())))", "7"),
        ("if __name__ == '__main__':\n print('main')", "main"),
        (
            "print(sqrt(16), heappop([1]), Counter('aa')['a'], datetime.date(2020, 1, 1).year)",
            "4.0 1 2 2020",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\nprint(A(1))",
            "A(x=1)",
        ),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(15000))", "15000"),
        ("open('own', 'w').write('x'); print(open('own').read())", "x"),
        (
            "import threading\nt = threading.Thread(target=print, args=('t',)); t.start(); "
            "t.join()",
            "t",
        ),
        ("import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))", "5"),
        ("import numpy; print(numpy.arange(3).sum())", "3"),
        ("print('é−')", "é−"),
        ("import sys; print('before'); sys.exit()", "before"),
        (
            "print(len(str(10**5000)))",
            "5001",
        ),
        (
            "import os; print(sorted(os.environ))",
            "['LANG', 'MKL_NUM_THREADS', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH']",
        ),
    ],
)
def test_a_program_may(sandbox: Sandbox, source: str, output: str) -> None:
    ran = run(sandbox, source, memory=2 << 30)
    assert (ran.status, ran.output.strip()) == ("ok", output), ran.error


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import socket; socket.socket()", "Operation not permitted"),
        ("import socket; socket.socket(socket.AF_UNIX)", "Operation not permitted"),
        (
            "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
            "Operation not permitted",
        ),
        ("import os\nwhile True: os.fork()", "Operation not permitted"),
        ("import os; os.execv('/bin/sh', ['sh'])", "Operation not permitted"),
        ("import subprocess; subprocess.run(['true'])", "Operation not permitted"),
        ("import os; os.kill(os.getppid(), 9)", "Operation not permitted"),
        ("import os; os.kill(-1, 9)", "Operation not permitted"),
        ("import os; os.setsid()", "Operation not permitted"),
        (
            "import resource; resource.prlimit(__import__('os').getppid(), resource.RLIMIT_CPU, "
            "(0, 0))",
            "not permitted",
        ),
        ("open('/tmp/sluice-escaped', 'w')", "Error: [Errno"),
        ("open('/etc/passwd').read()", "Permission denied"),
        ("import os; os.listdir('/')", "Permission denied"),
        ("import os; open(f'/proc/{os.getppid()}/environ').read()", "Error: [Errno"),
        ("import os; os.symlink('/etc/passwd', 'p'); open('p').read()", "Permission denied"),
        (f"open('{ROOT}/README.md').read()", "Permission denied"),
        ("bytearray(8 << 30)", "MemoryError"),
        ("open('f', 'wb').write(bytes(32 << 20))", "File too large"),
        ("[open(f'f{i}', 'w') for i in range(100)]", "Too many open files"),
        (
            "import threading, time\nfor _ in range(9999): threading.Thread(target=time.sleep, "
            "args=(9,)).start()",
            "can't start new thread",
        ),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
            "not allowed to raise maximum limit",
        ),
        ("import ctypes; ctypes.string_at(0)", ""),
        ("1 / 0", "ZeroDivisionError"),
        ("this is no program", "SyntaxError"),
        ("(" * 100_000, ""),
        ("import sys; sys.exit(1)", ""),
    ],
)
def test_a_program_may_not(sandbox: Sandbox, source: str, error: str) -> None:
    ran = run(sandbox, source)
    assert (ran.status, error in ran.error) == ("error", True), ran
    assert not Path("/tmp/sluice-escaped").exists()


@pytest.mark.parametrize(
    "call",
    ["l.syscall(41, 2, 1, 0)", "l.syscall(57)", "l.syscall(435, 0, 0)", "l.syscall(425, 8, 0)"],
)
def test_raw_system_calls_are_denied_too(sandbox: Sandbox, call: str) -> None:
    ran = run(sandbox, f"import ctypes; l = ctypes.CDLL(None); print({call})")
    assert (ran.status, ran.output) == ("ok", "-1\n")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other machines have one table of calls")
def test_calls_under_their_other_numbers_end_the_program(sandbox: Sandbox) -> None:
    assert (
        run(sandbox, "import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0)").status
        == "error"
    )


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(1000)", "timeout"),
        (
            "import signal\nfor s in {1, 2, 3, 15, 24}: signal.signal(s, signal.SIG_IGN)\nwhile "
            "True: pass",
            "timeout",
        ),
        ("import os; os.close(1); os.close(2); os.close(3)\nwhile True: pass", "timeout"),
        ("while True: print('x' * 10000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 10000)", "output"),
    ],
)  # fmt: skip
def test_endless_programs_are_ended(sandbox: Sandbox, source: str, status: str) -> None:
    assert run(sandbox, source, seconds=1.5).status == status
    assert run(sandbox, "print(1)") == ProgramRun("ok", "1\n", "")


def test_tests_leave_nothing_behind_and_see_nothing_of_one_another(sandbox: Sandbox) -> None:
    first = run(
        sandbox, "import os, builtins; builtins.mark = 1; open('mark', 'w'); print(os.getcwd())"
    )
    again = run(sandbox, "import os, builtins; print(hasattr(builtins, 'mark'), os.listdir())")
    assert again.output == "False []\n"
    assert not Path(first.output.strip()).exists()


def test_functions_are_called_and_their_prints_do_not_count(sandbox: Sandbox) -> None:
    source = (
        "class Solution:\n  def add(self, a: List[int], b):\n    print('noise'); return tuple(a + "
        "[b])"
    )
    assert run(sandbox, source, call="add", arguments="[[1], 2]") == ProgramRun("ok", "[1, 2]", "")
    assert run(sandbox, "def f(): return object()", call="f", arguments="[]").status == "error"
    assert run(sandbox, "def f(): return 1", call="g", arguments="[]").status == "error"


def test_leaving_early_passes_no_check(sandbox: Sandbox) -> None:
    assert run(sandbox, "def f(): return 1", check="assert f() == 1").status == "ok"
    assert run(sandbox, "def f(): return 1", check="assert f() == 2").status == "error"
    for exit_ in ("import os; os._exit(0)", "import sys; sys.exit(0)", "exit()"):
        assert run(sandbox, exit_, check="assert False").status == "error"
    assert (
        run(sandbox, "import os\nos.write(3, b'x' * 32); os._exit(0)", check="assert False").status
        == "error"
    )


TESTS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "7 8\n"], "outputs": ["3\n", "7\n", "11\n", "15\n"]}


def sample(program: str, label: Any = TESTS) -> RewardInput:
    return RewardInput(prompt="p", response=f"So:\n```python\n{program}\n```\n", label=label)


async def judged(*samples: RewardInput, **fields: Any) -> list[Any]:
    judge = Judge(Reward(type="code", **fields), workers=1)
    try:
        await judge.check()
        return await judge(list(samples))
    finally:
        await judge.close()


async def test_the_reward_of_programs() -> None:
    right, half, wrong, nothing, broken = await judged(
        sample("print(sum(map(int, input().split())))"),
        sample("a, b = map(int, input().split()); print(a + b if a < 4 else 0)"),
        sample("print('no')"),
        RewardInput(prompt="p", response="```\n", label=TESTS),
        sample("x", {"inputs": [1]}),
    )
    assert right == (1.0, {"score": 1.0, "passed": 1.0})
    assert half == (0.0, {"score": 0.0, "passed": 0.5})
    assert wrong == nothing == (0.0, {"score": 0.0, "passed": 0.0})
    assert isinstance(broken, RewardError)
    assert "label: inputs and outputs" in str(broken)


async def test_partial_credit_and_functions() -> None:
    label = {"inputs": ["[1, 2]\n3", "[]\n1"], "outputs": ["[1, 2, 3]", "[2]"], "fn_name": "add"}
    outcomes = await judged(sample("def add(a, b): return a + [b]", label), key="passed")
    assert outcomes == [(0.5, {"score": 0.0, "passed": 0.5})]


async def test_a_program_that_never_ends_is_wrong_and_not_a_failed_sample() -> None:
    slow, fine = await judged(
        sample("a = input()\nwhile a != '1 2': pass\nprint(3)"),
        sample("print(sum(map(int, input().split())))"),
        timeout_seconds=4,
        sandbox={"test_seconds": 1},
    )
    assert slow == (0.0, {"score": 0.0, "passed": 0.25})
    assert fine[0] == 1.0


LOOKS_AROUND = """
import gc, sys
wanted = ["".join(["GIRA", "FFE"]), "".join(["ZEB", "RA"])]
frames, frame = [], sys._getframe()
while frame:
    frames.append(list(frame.f_locals.values()))
    frame = frame.f_back
for o in [*gc.get_objects(), *(value for values in frames for value in values)]:
    inside = list(o.values()) if type(o) is dict else o if type(o) in (list, tuple) else ()
    for s in inside:
        if type(s) is not str or len(s) >= 12: continue
        if any(s.startswith(w) and len(s) > len(w) for w in wanted):
            print(s.strip())
            raise SystemExit
"""


async def test_expected_outputs_never_come_near_the_program() -> None:
    """A program that looks through its memory finds what it was given (so it can look), and no
    expected output."""
    label = {"inputs": ["GIRAFFE7", "x", "x"], "outputs": ["GIRAFFE7", "ZEBRA42", "ZEBRA43"]}
    (outcome,) = await judged(sample(LOOKS_AROUND, label), key="passed")
    assert outcome[1]["passed"] == pytest.approx(1 / 3)
