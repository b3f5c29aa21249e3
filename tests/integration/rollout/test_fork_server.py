"""Episodes that are forked from one interpreter: what they see, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sluice_rollout.environments import directories, inputs, orphan_reaper
from sluice_rollout.environments.fork_server_process import ForkServerLostError, ForkServerProcess
from sluice_rollout.environments.fork_server_supervisor import ForkServerSupervisor, pause
from sluice_rollout.environments.process import KEPT_BYTES, ProgramExit

MODULE = Path(__file__).with_name("forked_play.py")
SECONDS = 60.0  # for what takes a moment on an idle machine
WORKER = """
import asyncio, sys
from pathlib import Path
from tests.integration.rollout.test_fork_server import open_supervisor, play_episode

async def main():
    async with open_supervisor() as (supervisor, root):
        await play_episode(supervisor, root, 0, DO="hang", TELL=sys.argv[1])

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def open_supervisor(load: str = "") -> AsyncIterator[tuple[ForkServerSupervisor, str]]:
    """Open a supervisor of the tests' play module. Yields it with the directory for episodes."""
    variables = inputs.inherited_variables(os.environ, {"PYTHONDONTWRITEBYTECODE": "1"})
    supervisor = ForkServerSupervisor(
        "words", sys.executable, MODULE, json.dumps({"load": load}), variables
    )
    with directories.open_root(64) as root:
        try:
            yield supervisor, root
        finally:
            supervisor.close()


async def play_episode(
    supervisor: ForkServerSupervisor, root: str, number: int, **variables: str
) -> tuple[ProgramExit, Any]:
    """Play an episode. Returns its end, and its result.json if there is one."""
    directory = Path(root, f"{number}.0-episode")
    (directory / inputs.TEMPORARY).mkdir(parents=True)
    try:
        run = await supervisor.ready(root)
        passed = {
            "PATH": os.environ["PATH"],
            **variables,
            **inputs.directory_variables(str(directory)),
        }
        ended = await run(str(directory), passed)
        result = directory / "result.json"
        return ended, json.loads(result.read_text()) if result.exists() else None
    finally:
        directories.remove(str(directory))


async def until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    async with asyncio.timeout(seconds):
        while not (value := condition()):
            await asyncio.sleep(0.05)
    return value


def is_alive(pid: int) -> bool:
    """True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def reported_pids(path: Path) -> list[int]:
    """Wait for the process ids that an episode has written."""

    def read() -> Any:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return json.loads(path.read_text())

    return list(await until(read))


def server_pid(supervisor: ForkServerSupervisor) -> int:
    assert supervisor._process
    assert supervisor._process._transport
    return supervisor._process._transport.get_pid()


def children(pid: int) -> list[str]:
    """Return the children of a process, including zombies."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_an_episode_is_a_child_with_the_variables_of_a_program() -> None:
    async with open_supervisor() as (supervisor, root):
        ended, seen = await play_episode(supervisor, root, 0, SAY="hello")
        assert seen["loader"] == server_pid(supervisor) != seen["pid"]
    assert (ended.status, ended.out, ended.err) == (0, "out hello", "err hello")
    directory = f"{root}/0.0-episode"
    assert (seen["directory"], seen["temporary"]) == (directory, f"{directory}/tmp")
    assert seen["ours"], "a session of its own"
    assert seen["seen_with"] == 1, "others find it by its episode's directory"
    assert seen["variables"].keys() - {"LC_CTYPE"} == {
        "PATH", "SAY", "TMPDIR", "SLUICE_ARTIFACTS", "SLUICE_EPISODE",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("do", "status", "err"),
    [
        pytest.param("fail", 1, "the door is shut", id="text"),
        pytest.param("number", 3, "err", id="number"),
        pytest.param("nothing", 1, "KeyError: 'nothing'", id="exception"),
        pytest.param("die", -signal.SIGSEGV, "err", id="signal"),
        pytest.param("crash", -signal.SIGSEGV, "err", id="crash"),
    ],
)
async def test_the_end_of_a_child_is_reported_as_that_of_a_program(
    do: str, status: int, err: str
) -> None:
    async with open_supervisor() as (supervisor, root):
        ended, _ = await play_episode(supervisor, root, 0, DO=do)
        again, _ = await play_episode(supervisor, root, 1)
    assert (ended.status, (ended.err.splitlines() or ["err"])[-1].strip()) == (status, err)
    assert again.status == 0


async def test_the_end_of_a_childs_outputs_is_kept() -> None:
    async with open_supervisor() as (supervisor, root):
        ended, _ = await play_episode(supervisor, root, 0, DO="much")
    assert ended.out.endswith("x\nthe last of it")
    assert ended.err.endswith("y\nthe last error")
    assert KEPT_BYTES - 10 < len(ended.out) <= KEPT_BYTES


async def test_a_child_ends_as_python_does() -> None:
    """Threads are waited for; exit handlers of the play module run in the parent only."""
    async with open_supervisor() as (supervisor, root):
        ended, _ = await play_episode(supervisor, root, 0, DO="at_exit")
    assert (ended.out, ended.err) == ("out \na thread\nthe child's", "err")


async def test_processes_that_a_child_leaves_are_killed() -> None:
    async with open_supervisor() as (supervisor, root):
        tell = Path(root, "told")
        ended, _ = await play_episode(supervisor, root, 0, DO="leave_behind", TELL=str(tell))
        left = json.loads(tell.read_text())
        assert (ended.status, len(left), [pid for pid in left if is_alive(pid)]) == (0, 2, [])


async def test_a_cancelled_episode_ends_with_all_its_processes(tmp_path: Path) -> None:
    async with open_supervisor() as (supervisor, root):
        other = asyncio.create_task(
            play_episode(supervisor, root, 1, DO="hang", TELL=str(tmp_path / "other"))
        )
        playing = asyncio.create_task(
            play_episode(supervisor, root, 0, DO="hang", TELL=str(tmp_path / "told"))
        )
        processes = await reported_pids(tmp_path / "told")
        others = await reported_pids(tmp_path / "other")
        assert all(map(is_alive, [*processes, *others]))
        playing.cancel()
        await asyncio.wait([playing])
        await until(lambda: not any(map(is_alive, processes)))
        assert all(map(is_alive, others))
        assert len(children(server_pid(supervisor))) == 1
        other.cancel()
        await asyncio.wait([other])


async def test_a_fork_server_that_dies_is_started_again_and_its_episodes_are_lost(
    tmp_path: Path,
) -> None:
    async with open_supervisor() as (supervisor, root):
        files = [tmp_path / str(number) for number in range(3)]
        playing = [
            asyncio.create_task(play_episode(supervisor, root, number, DO="hang", TELL=str(file)))
            for number, file in enumerate(files)
        ]
        processes = [pid for file in files for pid in await reported_pids(file)]
        before = server_pid(supervisor)
        os.kill(before, signal.SIGKILL)
        lost = await asyncio.gather(*playing, return_exceptions=True)
        assert [type(error) for error in lost] == [ForkServerLostError] * 3
        await until(lambda: not any(map(is_alive, processes)))
        ended, seen = await play_episode(supervisor, root, 3)
        assert (ended.status, seen["loader"]) == (0, server_pid(supervisor))
        assert server_pid(supervisor) != before
        assert len(os.listdir(root)) == 1, "the new one's directory"


async def test_a_fork_server_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server is stopped, so it cannot kill its child."""
    monkeypatch.setattr("sluice_rollout.environments.fork_server_process._END_SECONDS", 1.0)
    async with open_supervisor() as (supervisor, root):
        playing = asyncio.create_task(
            play_episode(supervisor, root, 0, DO="hang", TELL=str(tmp_path / "told"))
        )
        processes = await reported_pids(tmp_path / "told")
        os.kill(server_pid(supervisor), signal.SIGSTOP)
        playing.cancel()
        await asyncio.wait([playing])
        await until(lambda: not any(map(is_alive, processes)))
        assert (await play_episode(supervisor, root, 1))[0].status == 0


async def test_processes_end_with_a_killed_worker(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WORKER, str(tmp_path / "told")]
    worker = subprocess.Popen(words, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        processes = await reported_pids(tmp_path / "told")
        (root,) = tmp_path.glob(f"{directories.PREFIX}*")
        assert len(orphan_reaper.marked_processes(str(root))) == 4, (
            "the fork server, its child, and two of the child's"
        )
    finally:
        worker.kill()
        worker.wait(10)
    await until(
        lambda: not orphan_reaper.marked_processes(str(root)) and not is_alive(processes[0])
    )
    os.kill(processes[2], signal.SIGKILL)  # as today: neither our mark, nor a session that ends


async def test_two_hundred_episodes_in_a_row_leave_no_files_or_processes() -> None:
    async with open_supervisor() as (supervisor, root):
        draws = set()
        for number in range(200):
            ended, seen = await play_episode(supervisor, root, number)
            assert ended.status == 0, ended
            draws.add(seen["random"])
            if number == 0:
                files, mine = seen["files"], os.listdir("/proc/self/fd")
        assert seen["files"] == files
        assert len(os.listdir("/proc/self/fd")) == len(mine)
        assert len(draws) == 200, "each draws its own random numbers"
        assert children(server_pid(supervisor)) == []
        assert len(os.listdir(f"/proc/{server_pid(supervisor)}/fd")) < 12
        assert len(os.listdir(root)) == 1


async def test_thirty_two_episodes_at_once() -> None:
    async with open_supervisor() as (supervisor, root):
        say = [str(number) for number in range(32)]
        ends = await asyncio.gather(*(play_episode(supervisor, root, int(n), SAY=n) for n in say))
        assert [ended.out for ended, _ in ends] == [f"out {n}" for n in say]
        assert len({seen["pid"] for _, seen in ends}) == 32


@pytest.mark.parametrize(
    ("load", "why"),
    [
        pytest.param("thread", "it has 2 threads", id="thread"),
        pytest.param("file", f"it keeps open {MODULE}", id="file"),
        pytest.param("process", "it has started processes", id="process"),
    ],
)
async def test_an_environment_that_cannot_be_forked_has_an_interpreter_for_each_episode(
    load: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    log = type("Log", (), {"warning": staticmethod(lambda _, **fields: said.append(fields))})
    monkeypatch.setattr("sluice_rollout.environments.fork_server_supervisor.logs.get", lambda: log)
    async with open_supervisor(load) as (supervisor, root):
        played = [await play_episode(supervisor, root, number) for number in range(2)]
        assert os.listdir(root) == []
    assert [ended.status for ended, _ in played] == [0, 0]
    assert all(seen["loader"] == seen["pid"] for _, seen in played)
    assert said == [{"environment": "words", "reason": why}]


async def test_messages_of_an_interpreter_that_has_ended_already_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    begin = loop.subprocess_exec

    async def late(*arguments: Any, **options: Any) -> Any:
        transport, protocol = await begin(*arguments, **options)
        if isinstance(protocol, ForkServerProcess):
            await protocol.exited.wait()
        return transport, protocol

    monkeypatch.setattr(loop, "subprocess_exec", late)
    async with open_supervisor("file") as (supervisor, root):
        ended, seen = await play_episode(supervisor, root, 0)
    assert (ended.status, seen["loader"]) == (0, seen["pid"])


async def test_an_environment_that_cannot_be_loaded_is_tried_again_later() -> None:
    async with open_supervisor("raise") as (supervisor, root):
        starting: list[Awaitable[Any]] = [supervisor.ready(root) for _ in range(3)]
        lost = await asyncio.gather(*starting, return_exceptions=True)
        assert len(set(map(id, lost))) == 1, "all wait for the same start"
        assert isinstance(lost[0], ForkServerLostError)
        assert "words cannot be loaded: ended with status 1: RuntimeError: no such" in str(lost[0])
        assert os.listdir(root) == []


def test_the_pause_before_a_restart_grows_with_deaths_in_a_row() -> None:
    assert [pause(deaths) for deaths in (0, 1, 2, 3, 4, 8, 30)] == [0, 0, 1, 2, 4, 60, 60]
