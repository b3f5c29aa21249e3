"""The tool `python`: a session that is kept, programs that hang or attack, and the worker that does
not mind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.rewards.sandbox import isolation
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.toolbox import Python
from sluice_rollout.tools import ToolLoop, ToolUnavailableError
from tests import chat
from tests.integration.rewards import attacks
from tests.unit.rollout.scripted_engine import PARAMS, Script, scripted_runner


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
    tool = Python(seconds=8.0, sandboxes=1)
    yield tool
    tool.close()


def played(python: Python, *programs: str) -> list[str]:
    session = python.session()
    return [session(code=program) for program in programs]


def test_a_session_is_kept(python: Python) -> None:
    answers = played(
        python,
        "import math\nx = 3\ndef twice(n): return 2 * n",
        "print('seen', x); twice(x) + math.floor(1.5)",
        "open('notes', 'w').write('kept'); x += 1",
        "x, open('notes').read()",
    )
    assert answers == ["", "seen 3\n7\n", "", "(4, 'kept')\n"]


def test_random_numbers_stay_what_they_were(python: Python) -> None:
    answers = played(python, "import random\nx = random.random(); x", "x", "random.random() == x")
    assert answers[0] == answers[1] != ""
    assert answers[2] == "False\n"


def test_an_error_is_what_the_model_reads_and_the_session_goes_on(python: Python) -> None:
    answers = played(python, "x = 1\nx / 0", "x", "import sys; sys.exit(3)", "def", "x")
    assert answers[0].startswith("Traceback")
    assert '"<program 1>", line 2' in answers[0]
    assert answers[0].endswith("ZeroDivisionError: division by zero\n")
    assert answers[1:3] == ["1\n", ""]
    assert "SyntaxError" in answers[3]
    assert answers[4] == "1\n"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("y = 1\nwhile True: pass", "no end after 8 s"),
        ("print('x' * 10_000_000)", "it printed too much"),
        ("import os; os._exit(9)", "it was ended"),
        ("y = bytearray(1 << 31)", "MemoryError"),
        ("import os; os._exit(0)", "it was ended: it ended its process"),
        ("import os; os.kill(os.getpid(), 9)", "Operation not permitted"),
        ("import socket; socket.socket()", "Operation not permitted"),
        ("open('/etc/passwd')", "Error"),
        ("import subprocess; subprocess.run(['ls'])", "Operation not permitted"),
    ],
    ids=[
        "hangs",
        "prints",
        "exits",
        "exits well",
        "memory",
        "a signal",
        "the network",
        "a file",
        "a program",
    ],
)
def test_a_program_that_misbehaves_costs_itself_alone(
    python: Python, program: str, reason: str
) -> None:
    before, answer, after = played(python, "x = 5", program, "x, 'y' in globals()")
    assert before == ""
    assert reason in answer
    assert after == "(5, False)\n"


def test_an_answer_and_an_episode_have_limits() -> None:
    tool = Python(longest=100, most_programs=2, sandboxes=1)
    try:
        answers = played(tool, "print('a' * 500)", "1", "2")
    finally:
        tool.close()
    assert "(401 characters left out)" in answers[0]
    assert answers[1:] == ["1\n", "error: no more programs: an episode has 2"]


@pytest.mark.parametrize("code", ["\0", "x" * (2 << 20), 5], ids=["a zero", "long", "a number"])
def test_what_is_no_program_is_said(python: Python, code: Any) -> None:
    assert "error: a program is a text" in python.session()(code=code)


def test_sessions_do_not_see_one_another(python: Python) -> None:
    assert played(python, "x = 1; open('a', 'w').close()") == [""]
    assert played(python, "import os; 'x' in globals(), os.path.exists('a')") == [
        "(False, False)\n"
    ]


@pytest.mark.parametrize("attack", attacks.ATTACKS)
def test_no_way_of_an_attack_succeeds(python: Python, attack: str, tmp_path: Path) -> None:
    """From the second program of a session, too."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    os.setxattr(victim, "user.kept", b"1")
    segment = ctypes.CDLL(None).shmget(0, ctypes.c_size_t(4096), 0o1600)
    process = subprocess.Popen(["sleep", "100"])
    try:
        tools = attacks.tools_against(victim, process.pid, segment, isolation().layers)
        source = f"{attacks.ATTACKS[attack]}\nprint(succeeded)"
        assert played(python, tools, source)[1].endswith("[]\n")
        assert process.poll() is None
        assert victim.read_text() == "untouched"
    finally:
        process.kill()
        process.wait()
        ctypes.CDLL(None).shmctl(segment, 0, None)


def test_a_sandbox_that_dies_is_replaced(python: Python) -> None:
    sandbox = python._sandboxes._free.get()
    assert sandbox is not None
    sandbox._zygote.kill()
    python._sandboxes._free.put(sandbox)
    assert played(python, "1 + 1") == ["2\n"]


def test_without_a_free_sandbox_the_sample_fails(
    python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_rollout.toolbox.sandboxes._FREE_SECONDS", 0.01)
    sandbox = python._sandboxes._free.get()
    try:
        with pytest.raises(ToolUnavailableError, match=r"no sandbox was free in 0\.01 s"):
            played(python, "1")
    finally:
        python._sandboxes._free.put(sandbox)


async def test_the_loop_of_tools_plays_it(python: Python) -> None:
    """Episodes have separate sessions; parallel ones share the sandboxes."""
    tokenizer = chat.tokenizer()

    def ids(text: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    call = '<tool_call>{"name": "python", "arguments": {"code": "%s"}}</tool_call>'
    turns = [ids(call % "x = 20"), ids(call % "x + 1"), ids("21")]

    async def play() -> Sample:
        engine = Script(*turns)
        runner = scripted_runner(ToolLoop([python]), engine)
        runner.tokenizer = tokenizer
        runner.generator.decode = tokenizer.decode
        return await runner(Prompt(0, "?"), [1], Sample(0), PARAMS | {"max_new_tokens": 900})

    samples = await asyncio.gather(*(play() for _ in range(4)))
    for sample in samples:
        assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
        assert "21\n" in tokenizer.decode(sample.tokens[sample.prompt_length :].tolist())
        assert sample.metadata["tool_calls"] == 2
