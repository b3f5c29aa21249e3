"""The process behind the sandbox: no program ends it, and if something else does, the next
program is judged."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.api import Reward
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judging.judge import Judge
from sluice.rewards.sandbox import ProgramRun, Sandbox, client
from tests.integration.rewards.machines import MACHINES, ROOT, environment

MESSES = {
    "directories in directories": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')",
    "unreadable directories": """
import os
os.mkdir('a'); os.mkdir('a/b'); open('a/b/c', 'w'); os.mkdir('a/empty', 0); os.mkdir('closed', 0)
os.mkdir('write only', 0o300); open('write only/x', 'w'); os.mkdir('write only/in it', 0o100)
os.umask(0o777); os.mkdir('masked')
""",
    "many files": "import os\nfor i in range(3000): open(str(i), 'w').close()",
    "pipes": "import os\nfor i in range(100): os.mkfifo(str(i))",
    "links": """
import os
os.symlink('a', 'b'); os.symlink('b', 'a'); os.symlink('.', 'here')
os.symlink('/', 'root'); os.symlink('..', 'up')
os.mkdir('d'); os.symlink('../d', 'd/again'); open('one', 'w'); os.link('one', 'two')
""",
    "names": "import os\nfor n in (b'\\xff', b'a\\nb', b'-rf', b' ', b'x' * 255): os.mkdir(n); "
    "open(n + b'/' + n, 'w')",
}

ALL_MESSES = """
import json, os, sys
from sluice.rewards.sandbox import Sandbox
def run(source):
    return sandbox.run(source=source, input="1", seconds=20.0, memory=1 << 30, cpu_seconds=20)
sandbox, answer = Sandbox(), {}
zygote = sandbox._zygote
for name, source in json.loads(sys.argv[1]).items():
    status = run(source).status
    after = run("import os; print(int(input()) + 1, os.path.dirname(os.getcwd()))")
    total, home = after.output.split()
    same = sandbox._zygote is zygote
    answer[name] = [status in ("ok", "limit"), after.status, total, os.listdir(home), same]
sandbox.close()
print(json.dumps([answer, os.path.exists(home)]))
"""


@pytest.mark.parametrize(
    "machine", ["account, RuntimeDefault", "root, RuntimeDefault", "account", "root"]
)
def test_no_program_ends_the_zygote_or_leaves_something_behind(machine: str) -> None:
    command = MACHINES[machine].command("-c", ALL_MESSES, json.dumps(MESSES))
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [
        {name: [True, "ok", "2", [], True] for name in MESSES},
        False,
    ]


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


def run(sandbox: Sandbox, source: str = "print(1)", seconds: float = 60.0) -> ProgramRun:
    return sandbox.run(source=source, input="", seconds=seconds, memory=1 << 30, cpu_seconds=60)


RIGHT = ProgramRun("ok", "1\n", "")
WAITS = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
time.sleep(1000)
"""


def zygotes() -> list[psutil.Process]:
    """Those of this process; the processes that they fork have the same command line."""
    running = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (
                client._BOOT in child.cmdline()
                and client._BOOT not in psutil.Process(child.ppid()).cmdline()
            ):
                running.append(child)
    return running


class Killer(threading.Thread):
    """Kills a zygote as soon as it runs a program of more than one thread, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(daemon=True)
        self._times = times
        self.programs: list[psutil.Process] = []

    def run(self) -> None:
        killed: set[int] = set()
        while len(killed) < self._times:
            for zygote in zygotes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    programs = [child for child in zygote.children() if child.num_threads() > 1]
                    if programs and zygote.pid not in killed:
                        self.programs += programs
                        zygote.kill()
                        killed.add(zygote.pid)


def test_a_zygote_killed_between_programs_is_replaced(sandbox: Sandbox) -> None:
    for _ in range(3):
        (zygote,) = zygotes()
        zygote.kill()
        zygote.wait(30)
        assert run(sandbox) == RIGHT


def test_a_program_at_which_the_zygote_is_killed_is_judged_again(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    (zygote,) = zygotes()
    waits = "".join(f"  {line}\n" for line in WAITS.splitlines())
    killer = Killer(1)
    killer.start()
    assert run(sandbox, f"import os\nif os.getppid() == {zygote.pid}:\n{waits}print(1)") == RIGHT
    killer.join()
    assert (
        "the sandbox failed at a test (its process ended: signal SIGKILL) and is replaced"
        in caplog.text
    )


def test_a_program_at_which_the_zygote_is_killed_twice_fails_alone(sandbox: Sandbox) -> None:
    killer = Killer(2)
    killer.start()
    with pytest.raises(
        RewardError, match=r"failed twice at one test \(its process ended: signal SIGKILL"
    ) as failure:
        run(sandbox, WAITS)
    killer.join()
    assert failure.value.reason == "died"
    assert run(sandbox) == RIGHT
    assert psutil.wait_procs(killer.programs, timeout=30)[1] == []  # they do not outlive it


def test_a_zygote_that_hangs_is_replaced(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    (zygote,) = zygotes()
    zygote.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(client, "_GRACE_SECONDS", 1.0)
        with pytest.raises(RewardError, match="did not answer and was replaced") as failure:
            run(sandbox, seconds=1.0)
    assert failure.value.reason == "timeout"
    assert run(sandbox) == RIGHT


def test_the_next_zygote_removes_what_a_killed_one_left(sandbox: Sandbox) -> None:
    home = Path(run(sandbox, "import os; print(os.getcwd())").output.strip()).parent
    (home / "test-left" / "deep").mkdir(parents=True)
    (zygote,) = zygotes()
    zygote.kill()
    assert run(sandbox) == RIGHT
    assert not home.exists()


def test_a_zygote_whose_directory_was_tidied_away_is_replaced(sandbox: Sandbox) -> None:
    shutil.rmtree(Path(run(sandbox, "import os; print(os.getcwd())").output.strip()).parent)
    assert run(sandbox) == RIGHT


LOSES_A_LAYER = """
import logging
from sluice.rewards.sandbox import Sandbox
logging.basicConfig(format="%(message)s")
sandbox = Sandbox()
limits = {"seconds": 20.0, "memory": 1 << 30, "cpu_seconds": 20}
def run(): return sandbox.run(source="print(1)", input="", **limits).status
print(sandbox.isolation, run())
open("/proc/sys/user/max_user_namespaces", "w").write("0")
print(sandbox.isolation, run())
"""


def test_a_layer_that_is_lost_later_is_missed_and_named() -> None:
    """No program runs with less than the sandbox says; it says so before it runs one."""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", LOSES_A_LAYER]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    if "unshare: " in done.stderr and not done.stdout:
        pytest.skip(f"no user namespaces here at all: {done.stderr}")
    assert done.stdout == "namespaces+landlock+seccomp ok\nnamespaces+landlock+seccomp ok\n"
    failed, missing = done.stderr.splitlines()
    assert "a program could not be confined: [Errno 28] unshare: No space left on device" in failed
    assert missing.startswith(
        "code: the sandbox has no layer 'namespaces' on this machine ([Errno 28] unshare: No space "
        "left"
    )


async def test_the_judge_goes_on_after_a_killed_zygote(caplog: pytest.LogCaptureFixture) -> None:
    label: dict[str, Any] = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    right = RewardInput(prompt="p", response="print(sum(map(int, input().split())))", label=label)
    judge = Judge(Reward(type="code"), workers=1)
    try:
        with caplog.at_level(logging.WARNING):
            await judge.check()
        assert all(
            record.message.startswith("code: the sandbox has no layer '")
            for record in caplog.records
        )
        for _ in range(2):
            assert await judge([right]) == [(1.0, {"score": 1.0, "passed": 1.0})]
            (zygote,) = zygotes()
            os.kill(zygote.pid, signal.SIGKILL)
        assert await judge([right]) == [(1.0, {"score": 1.0, "passed": 1.0})]
    finally:
        await judge.close()
