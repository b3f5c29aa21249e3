"""The tool `shell`: a session that is kept, and commands that hang or attack."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.toolbox import Shell
from sluice_rollout.toolbox.shell import unpack
from sluice_rollout.tools import ToolLoop
from tests import chat
from tests.unit.rollout.scripted_engine import PARAMS, Script, scripted_runner


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    tool = Shell(seconds=8.0, sandboxes=1)
    yield tool
    tool.close()


def run(shell: Shell, *commands: str) -> list[str]:
    session = shell.session()
    return [session(command=command) for command in commands]


def test_a_session_is_kept(shell: Shell) -> None:
    """Files, the working directory, exported variables, functions."""
    answers = run(
        shell,
        "mkdir -p a/b; cd a; echo data > b/file; export X='1 2'; double() { echo $(($1 * 2)); }",
        'cat b/file; echo "$X"; double 4; basename "$PWD"',
        "cd /usr; rm ~/a/b/file",
        "echo $PWD; ls ~/a/b; unset X",
        'echo "[$X]"',
    )
    assert answers == ["", "data\n1 2\n8\na\n", "", "/usr\n", "[]\n"]


def test_a_command_that_fails_says_how_and_what_it_did_is_kept(shell: Shell) -> None:
    answers = run(shell, "echo x > f; ls nothing", "exit 7", "false | true", "cat f")
    assert "No such file" in answers[0]
    assert answers[0].endswith("[exit status 2]")
    assert answers[1:] == ["[exit status 7]", "", "x\n"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo half; echo no > f; sleep 60", "no end after 8 s"),
        ("yes", "it wrote too much"),
        ("echo > /dev/tcp/127.0.0.1/80", "Operation not permitted"),
        ("kill -9 1", "Operation not permitted"),
        ("cat /proc/1/environ /etc/shadow", "Permission denied"),
        ("echo x > /usr/bin/x", "[exit status 1]"),
        ("chmod u+s f", "Operation not permitted"),
        ("head -c 100000000 /dev/zero > f", ""),
        ("trap - EXIT; cd /; exit 3", "[exit status 3]"),
        ("rm -rf .shell ~/.shell; exec 3>&-; true", ""),
    ],
    ids=["hangs", "writes", "the network", "a signal", "secrets", "a program", "set-user-id",
         "a large file", "without its end", "without its state"],
)  # fmt: skip
def test_a_command_that_misbehaves_costs_itself_alone(
    shell: Shell, command: str, reason: str
) -> None:
    before, answer, after = run(shell, "echo kept > f; echo kept > g", command, "cat ~/g")
    assert before == ""
    assert reason in answer
    assert after == "kept\n"


def test_many_processes_are_too_many(shell: Shell) -> None:
    answer, after = run(shell, "f() { f | f & }; f 2> /dev/null; sleep 5", "echo well")
    assert "error: " in answer
    assert after == "well\n"


def test_an_answer_and_an_episode_have_limits() -> None:
    tool = Shell(longest=100, most_commands=3, most_kept=1000, sandboxes=1)
    try:
        answers = run(tool, "seq 1000", "head -c 9999 /dev/urandom > f", "ls", "ls")
    finally:
        tool.close()
    assert "characters left out" in answers[0]
    assert "more than 1000 bytes packed, and not kept" in answers[1]
    assert answers[2:] == ["", "error: no more commands: an episode has 3"]


@pytest.mark.parametrize("command", ["\0", "x" * (1 << 17), 5], ids=["a zero", "long", "a number"])
def test_what_is_no_command_is_said(shell: Shell, command: Any) -> None:
    assert "error: a command is a text" in shell.session()(command=command)


def packed(*members: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return file.getvalue()


def member(
    name: str, size: int = 1, kind: bytes = tarfile.REGTYPE, to: str = ""
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, to
    return info


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(packed(member("../out")), id="a file beside the folder"),
        pytest.param(packed(member("/tmp/out")), id="a file elsewhere"),
        pytest.param(packed(member("link", 0, tarfile.SYMTYPE, "/etc")), id="a link"),
        pytest.param(packed(member("device", 0, tarfile.CHRTYPE)), id="a device"),
        pytest.param(packed(member("bomb", 65 << 20)), id="more than there is room for"),
        pytest.param(packed(*[member(str(n), 0) for n in range(4100)])[:100], id="half of one"),
        pytest.param(b"no archive", id="no archive"),
    ],
)
def test_a_state_that_a_command_has_forged_writes_nothing_elsewhere(
    state: bytes, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    unpack(state, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
    left = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    assert not any(path.is_symlink() or path.stat().st_size > 1 for path in left)


async def test_a_tool_loop_runs_commands(shell: Shell) -> None:
    call = (
        '<tool_call>{"name": "shell", "arguments": {"command": "echo 42 > f; cat f"}}</tool_call>'
    )
    tokenizer = chat.tokenizer()

    def ids(text: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    engine = Script(ids(call), ids("42"))
    runner = scripted_runner(ToolLoop([shell]), engine, seconds=30.0)
    runner.tokenizer, runner.generator.decode = tokenizer, tokenizer.decode
    sample = await runner(Prompt(0, "?"), [1], Sample(0), PARAMS | {"max_new_tokens": 500})
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    assert "42\n" in tokenizer.decode(engine.prompt_ids[1])
    assert sample.metadata["tool_calls"] == 1
