"""`--exact` runs a script with bash, which can do no harm."""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.rewards.sandbox import ProgramRun
from sluice.rewards.sandbox.confine import THREADS
from sluice_migrate.bash import sandboxed
from sluice_migrate.bash.sandboxed import ConfinedBash, confined_bash
from sluice_migrate.draft import ImportFailedError
from tests.unit.migrate.import_tools import run, spec_of


def _confines() -> bool:
    try:
        sandboxed.run_script("true", None, {})
    except ImportFailedError:
        return False
    return True


needs_a_sandbox = pytest.mark.skipif(
    not (shutil.which("bash") and _confines()), reason="no sandbox for bash on this machine"
)


@pytest.fixture(scope="module")
def bash() -> Iterator[ConfinedBash]:
    with confined_bash() as bash:
        yield bash


def commands(bash: ConfinedBash, text: str, **environment: str) -> list[list[str]]:
    return [[w.text for w in c.words] for c in bash.run(text, None, environment).commands]


@needs_a_sandbox
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python3 -m a x='1 2'", [["python3", "-m", "a", "x=1 2"]]),
        ("exec nohup torchrun --a b", [["torchrun", "--a", "b"]]),
        ("PY='uv run python'; $PY a.py", [["uv", "run", "python", "a.py"]]),
        ("bash -c 'python3 inner.py'", [["python3", "inner.py"]]),
        ("mkdir -p /data && cd /nowhere && python a.py", [["python", "a.py"]]),
        ("set -e; a-tool --x | tee log; python b.py", [["a-tool", "--x"], ["python", "b.py"]]),
        ("D=$(python -c 'import torch_npu' && echo npu || echo gpu); python $D",
         [["python", "gpu"]]),
        ("python x=$(echo /a/b.c | sed s/b/d/ | xargs basename)", [["python", "x=d.c"]]),
    ],
    ids=["a program", "exec", "a program of two words", "another shell", "folders", "a pipe",
         "no other machine", "text tools"],
)  # fmt: skip
def test_programs_are_recorded_and_not_run(
    bash: ConfinedBash, text: str, expected: list[list[str]]
) -> None:
    assert commands(bash, text) == expected


@needs_a_sandbox
def test_the_output_of_a_program_is_not_known(bash: ConfinedBash) -> None:
    script = bash.run("python a.py --gpus $(nvidia-smi -L) --home $HOME/x --n ${N:-3}", None, {})
    words = script.commands[-1].words
    assert [(word.text, word.missing) for word in words[3:]] == [
        ("$(nvidia-smi)", ("$(nvidia-smi)",)),
        ("--home", ()),
        ("${HOME}/x", ("HOME",)),
        ("--n", ()),
        ("3", ()),
    ]
    assert commands(bash, "python $N $HOME", N="7", HOME="/home/me") == [
        ["python", "7", "/home/me"]
    ]


@needs_a_sandbox
@pytest.mark.parametrize(
    "attempt",
    [
        "echo x > {file}",
        "rm -f {file}",
        "/bin/rm -f {file}",
        "cat {file} >&3; cat {secret} >&3",
        ": > /dev/tcp/127.0.0.1/{port}",
        "chmod 777 {file}; mv {file} {file}.moved; ln -sf /etc/passwd {file}",
        "while :; do :; done",
    ],
    ids=["write", "remove", "remove by path", "read", "network", "change", "loop"],
)
def test_a_script_can_do_no_harm(
    bash: ConfinedBash, attempt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxed, "SECONDS", 3.0)  # a busy machine starts bash slowly
    kept, secret = tmp_path / "kept", tmp_path / "secret"
    kept.write_text("mine")
    secret.write_text("s3cret")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        text = attempt.format(file=kept, secret=secret, port=listener.getsockname()[1])
        script = bash.run(f"python before.py\n{text}\n", None, {})
        with pytest.raises(TimeoutError):
            listener.accept()
    assert kept.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [kept, secret]
    assert "s3cret" not in str(script.commands)
    assert [word.text for word in script.commands[0].words] == ["python", "before.py"]


@needs_a_sandbox
def test_the_kernel_limits_processes_and_they_end_with_the_script(
    bash: ConfinedBash, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start few enough processes that a missing limit does no harm."""
    monkeypatch.setattr(sandboxed, "SECONDS", 3.0)
    marker = f"wait_{secrets.token_hex(8)}"
    waits = f"{marker}() {{ printf '2\\0child\\0here\\0' >&3; read -r line <&7; }}"
    text = (
        f"coproc cat; exec 7<&${{COPROC[0]}}\n{waits}\n"
        f"for ((i = 0; i < {THREADS + 40}; i++)); do {marker} & done\nwait\n"
    )
    script = bash.run(text, None, {"MARKER": marker})
    started = sum(command.words[0].text == "child" for command in script.commands)
    assert 1 < started < THREADS
    end = time.monotonic() + 20
    while left := [pid for pid in Path("/proc").glob("[0-9]*") if _is(pid, marker)]:
        assert time.monotonic() < end, f"{len(left)} processes are left"
        time.sleep(0.05)


def _is(process: Path, marker: str) -> bool:
    try:
        return marker.encode() in (process / "environ").read_bytes()
    except OSError:
        return False


@needs_a_sandbox
def test_a_script_can_source_files_of_its_project(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/common.sh").write_text("STEPS=${STEPS:-9}\n")
    (tmp_path / "scripts/run.sh").write_text(
        'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nsource "$HERE/common.sh"\n'
        "source /no/such.sh\n"
        "python3 train.py --prompt-data $HERE/rows.jsonl --hf-checkpoint /m --rm-type f1 "
        '--num-rollout $STEPS --rollout-batch-size "$(expr 4 + 4)" --n-samples-per-prompt 4\n'
    )
    result = run("slime", tmp_path / "scripts/run.sh", "--exact")
    spec = spec_of(result)
    assert spec["trainer"]["steps"] == 9
    assert spec["rollout"]["batchSize"] == 8
    assert spec["data"]["prompts"][0]["path"] == f"{tmp_path}/scripts/rows.jsonl"
    assert "run.sh (line 3): /no/such.sh: no such file" in result.stdout
    without = run("slime", tmp_path / "scripts/run.sh")
    assert "$(expr 4 + 4) is not run" in without.stdout


@needs_a_sandbox
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('set -u; python3 train.py --lr $LR', "line 1, run.sh: LR: unbound variable"),
        ('[ $# -gt 1 ] || { echo "usage: run.sh DIR"; exit 1; }', "message: usage: run.sh DIR"),
        ("exit 3", "the script ended with an error"),
    ],
    ids=["unbound", "usage", "without a word"],
)  # fmt: skip
def test_a_script_that_starts_nothing_says_why(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    result = run("slime", tmp_path / "run.sh", "--exact")
    assert result.exit_code == 2
    assert why in result.output


def test_a_script_is_not_run_without_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare:
        closed = False

        def run(self, **request: object) -> ProgramRun:
            return ProgramRun("refused", "", "namespaces: EPERM; landlock: ENOSYS")

        def close(self) -> None:
            self.closed = True

    bare = Bare()
    monkeypatch.setattr(sandboxed, "Sandbox", lambda: bare)
    with pytest.raises(ImportFailedError, match=r"cannot confine bash \(namespaces: EPERM"):
        sandboxed.run_script(f"echo x > {tmp_path}/ran", None, {})
    assert bare.closed
    assert list(tmp_path.iterdir()) == []
