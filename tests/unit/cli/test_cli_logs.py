"""`sluice logs`: several logs merged by time."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sluice_cli.status import logs
from sluice_cli.status.logs import LogFilter, Printer, rendered
from sluice_client.logs import LogLine, merged
from sluice_operator.cluster.local.reader import RunReader, stamp
from sluice_operator.cluster.view import JobSnapshot, LogStream, ReadError, TimedLine, log_streams

START = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


def stream(
    role: str = "trainer", replica: int = 0, attempt: int = 1, container: str = "", silent: str = ""
) -> LogStream:
    return LogStream(
        f"demo-{role}-{replica}-{attempt}-0", container or role, role, replica, attempt, 0, silent
    )


TRAINER, ENGINE = stream(), stream("rollout", container="engine")


def test_logs_are_merged_by_time() -> None:
    lines = merged([(TRAINER, [(at(1), "a"), (at(3), "c")]), (ENGINE, [(at(2), "b")])])
    assert [line.text for line in lines] == ["a", "b", "c"]


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0, 1000), max_size=20), max_size=5))
def test_a_merge_keeps_every_line_and_the_order_of_each_log(
    logs: list[list[float]],
) -> None:
    streams = [stream(replica=number) for number in range(len(logs))]
    given_lines = [[(at(time), f"{number}") for number, time in enumerate(times)] for times in logs]
    shown = list(merged([*zip(streams, given_lines, strict=True)]))
    assert [line.time for line in shown] == sorted(line.time for line in shown)
    for stream_, lines in zip(streams, given_lines, strict=True):
        assert [line.text for line in shown if line.stream == stream_] == [
            text for _, text in lines
        ]


def test_a_line_without_a_time_has_the_time_of_the_line_before_it() -> None:
    lines = [
        "import",
        "2026-01-31T12:00:05Z error boom",
        "Traceback",
        '{"timestamp": "2026-01-31T12:00:06.5Z"}',
        "end",
    ]
    assert list(stamp(lines)) == [
        (at(5), lines[0]),
        (at(5), lines[1]),
        (at(5), lines[2]),
        (at(6.5), lines[3]),
        (at(6.5), lines[4]),
    ]


def test_times_of_sglang_are_local_times() -> None:
    local = at(5).astimezone().strftime("[%Y-%m-%d %H:%M:%S TP0] decode")
    assert list(stamp([local])) == [(at(5), local)]


def test_a_line_is_named_after_its_pod_and_container() -> None:
    assert (
        rendered(LogLine(TRAINER, START, "[x] step"), 20).plain == "trainer-0-1-0        | [x] step"
    )
    assert rendered(LogLine(ENGINE, START, "up"), 20).plain == "rollout-0-1-0/engine | up"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        pytest.param("\x1b]52;c;aGk=\x07", "\\x1b]52;c;aGk=\\x07", id="the clipboard"),
        pytest.param("\x1b[2J\x9b2J", "\\x1b[2J\\x9b2J", id="an empty screen"),
        pytest.param("10%\r20%\r", "10%\\r20%", id="a bar that overwrites itself"),
        pytest.param("\x1b[32mINFO\x1b[0m up", "INFO up", id="colours are left out"),
    ],
)
async def test_control_characters_are_shown_as_text(written: str, shown: str) -> None:
    reader = Fake()
    reader.logs = {ENGINE: [(at(1), written)]}
    view, out, _ = printer(reader)
    await view.once()
    assert out.getvalue() == f"rollout-0-1-0/engine | {shown}\n"


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("2026-01-31T12:00:00Z info    lease granted group=3", True),
        ('{"event": "lease granted", "timestamp": "2026-01-31T12:00:00Z"}', True),
        ("error: the disk is full", True),
        ("    2026-01-31T12:00:00Z info    forged", False),
        ("[2026-01-31 12:00:00 TP0] decode", False),
    ],
    ids=["ours", "ours as JSON", "last words", "below a line of ours", "an engine's"],
)
def test_lines_in_another_format_are_dim(text: str, ours: bool) -> None:
    styles = [span.style for span in rendered(LogLine(TRAINER, START, text), 20).spans]
    assert ("dim" not in styles) is ours


@pytest.mark.parametrize(
    ("selected", "taken"),
    [
        (LogFilter(), True),
        (LogFilter(role="rollout", replica=0, container="engine", attempt=1), True),
        (LogFilter(role="trainer"), False),
        (LogFilter(replica=1), False),
        (LogFilter(container="worker"), False),
        (LogFilter(attempt=2), False),
    ],
    ids=[
        "everything",
        "this very log",
        "other role",
        "other replica",
        "other container",
        "other attempt",
    ],
)
def test_logs_are_selected_by_role_replica_container_and_attempt(
    selected: LogFilter, taken: bool
) -> None:
    assert selected.selects(ENGINE) is taken


class Fake:
    """A reader whose logs a test writes."""

    def __init__(self) -> None:
        self.logs: dict[LogStream, list[TimedLine] | str] = {}
        self.ended = False

    async def snapshot(self) -> JobSnapshot:
        raise NotImplementedError

    async def streams(self) -> tuple[list[LogStream], bool]:
        return [*self.logs], self.ended

    async def lines(
        self, stream: LogStream, *, follow: bool, tail: int | None
    ) -> AsyncIterator[TimedLine]:
        log = self.logs[stream]
        if isinstance(log, str):
            raise ReadError(log)
        for line in log:
            yield line


def printer(reader: Fake, **selected: Any) -> tuple[Printer, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    consoles = [Console(file=file, width=200, color_system=None) for file in (out, err)]
    return Printer(reader, LogFilter(**selected), *consoles), out, err


async def test_an_unreadable_log_does_not_hide_the_others() -> None:
    reader = Fake()
    waiting = stream("buffer", silent="ImagePullBackOff: no such image")
    reader.logs = {
        TRAINER: [(at(1), "step 1")],
        ENGINE: "no log of rollout-0-1-0/engine: gone",
        waiting: [],
    }
    view, out, err = printer(reader)
    await view.once()
    assert out.getvalue() == "trainer-0-1-0        | step 1\n"
    assert sorted(err.getvalue().splitlines()) == [
        "buffer-0-1-0 has no log yet: ImagePullBackOff: no such image",
        "no log of rollout-0-1-0/engine: gone",
    ]


async def test_it_is_an_error_if_no_log_can_be_read() -> None:
    reader = Fake()
    reader.logs = {ENGINE: "no log of rollout-0-1-0/engine: gone"}
    with pytest.raises(ReadError, match="gone"):
        await printer(reader)[0].once()


async def test_it_is_an_error_if_no_log_is_selected() -> None:
    reader = Fake()
    reader.logs = {TRAINER: []}
    with pytest.raises(ReadError, match="there are no logs with role buffer, replica 3"):
        await printer(reader, role="buffer", replica=3)[0].once()
    reader.logs = {}
    with pytest.raises(ReadError, match="there are no logs: no such pod"):
        await printer(reader)[0].once()


async def test_followed_logs_include_pods_that_start_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.05)
    reader = Fake()
    reader.logs = {TRAINER: [(at(1), "attempt 1")], ENGINE: [(at(2), "up")]}
    view, out, _ = printer(reader)
    following = asyncio.create_task(view.follow())
    await asyncio.sleep(0.3)
    later = stream(attempt=2, silent="ContainerCreating")
    reader.logs[later] = []
    await asyncio.sleep(0.1)
    del reader.logs[later]
    reader.logs[stream(attempt=2)] = [(at(3), "attempt 2")]
    await asyncio.sleep(0.1)
    reader.ended = True
    await asyncio.wait_for(following, 10)
    assert [line.partition(" | ")[2] for line in out.getvalue().splitlines()] == [
        "attempt 1",
        "up",
        "attempt 2",
    ]


def test_a_waiting_container_says_what_it_waits_for() -> None:
    state = {
        "waiting": {
            "reason": "CreateContainerConfigError",
            "message": 'secret "demo-token" not found',
        }
    }
    labels = {"sluice.dev/role": "trainer"}
    pod = {
        "metadata": {"name": "demo-trainer-0-1-0", "labels": labels},
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": state}]},
    }
    assert log_streams(pod)[0].silent == 'CreateContainerConfigError: secret "demo-token" not found'
    assert (
        log_streams({**pod, "status": {"phase": "Pending"}})[0].silent == "the pod waits for a node"
    )
    running = {
        "phase": "Running",
        "containerStatuses": [{"name": "trainer", "state": {"running": {}}}],
    }
    assert log_streams({**pod, "status": running})[0].silent == ""


def run_directory(directory: Path, phase: str = "Running") -> RunReader:
    (directory / "logs").mkdir()
    (directory / "job.json").write_text(json.dumps({"metadata": {"name": "demo"}, "spec": {}}))
    pod = {"metadata": {"name": "demo-trainer-0-1-0"}, "status": {"phase": phase}}
    state = {"format": 1, "status": {"state": "Running"}, "pods": {"demo-trainer-0-1-0": pod}}
    (directory / "state.json").write_text(json.dumps(state))
    return RunReader(directory)


async def test_the_logs_of_a_run_directory_are_its_files(tmp_path: Path) -> None:
    reader = run_directory(tmp_path)
    (tmp_path / "logs/demo-rollout-1-2-0.engine.log").write_text("a\nb\nc\n")
    (tmp_path / "logs/notes.log").write_text("not a container's")
    ([log], ended) = await reader.streams()
    assert (log.role, log.replica, log.attempt, log.index, log.container) == (
        "rollout",
        1,
        2,
        0,
        "engine",
    )
    assert not ended
    assert [text async for _, text in reader.lines(log, follow=False, tail=2)] == ["b", "c"]


async def test_a_file_is_followed_until_its_pod_has_ended(tmp_path: Path) -> None:
    reader = run_directory(tmp_path)
    log = tmp_path / "logs/demo-trainer-0-1-0.trainer.log"
    log.write_text("first\n")
    texts: list[str] = []

    async def read() -> None:
        async for _, text in reader.lines(TRAINER, follow=True, tail=None):
            texts.append(text)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.3)
    with log.open("a") as file:
        file.write("second\nthi")
    await asyncio.sleep(0.5)
    with log.open("a") as file:
        file.write("rd\n")
    await asyncio.sleep(0.5)
    state = json.loads((tmp_path / "state.json").read_text())
    state["pods"] = {}
    (tmp_path / "state.json").write_text(json.dumps(state))
    await asyncio.wait_for(reading, 10)
    assert texts == ["first", "second", "third"]


async def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"no job\.json there; expected the directory of a run"):
        await RunReader(tmp_path).streams()
