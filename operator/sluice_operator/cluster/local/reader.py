"""Reads the job of a run directory, running or not, for `sluice status` and `sluice logs`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.api import FINISHED
from sluice.telemetry import run_directory
from sluice_operator.cluster.local.run_state import RunDirectoryError, State, StateFile
from sluice_operator.cluster.view import JobEvent, JobSnapshot, LogStream, ReadError, TimedLine

LOGS = "logs"
POLL_SECONDS = 0.25
_UTC = re.compile(r'^(?:\{.*"timestamp": "|)(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?)Z')
_LOCAL = re.compile(r"^\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?)")


class RunReader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def snapshot(self) -> JobSnapshot:
        state = self._state()
        try:
            job = json.loads((self._directory / run_directory.JOB).read_text())
        except ValueError as error:
            raise ReadError(
                f"{self._directory / run_directory.JOB}: not valid JSON ({error})"
            ) from error
        job["status"] = state.status or {}
        events = [
            JobEvent(
                datetime.fromisoformat(record["time"]),
                record["type"],
                record["reason"],
                record["message"],
            )
            for record in _records(self._directory / run_directory.EVENTS)
        ]
        return JobSnapshot(
            f"run directory {self._directory}",
            job,
            tuple(state.pods.values()),
            tuple(events),
            directory=self._directory,
        )

    async def streams(self) -> tuple[list[LogStream], bool]:
        """Return all logs of the directory, including those of older attempts."""
        state = self._state().status or {}
        streams = [_stream(path) for path in sorted((self._directory / LOGS).glob("*.log"))]
        return [stream for stream in streams if stream], state.get("state") in FINISHED

    async def lines(
        self, stream: LogStream, *, follow: bool, tail: int | None
    ) -> AsyncIterator[TimedLine]:
        path = self._directory / LOGS / f"{stream.pod}.{stream.container}.log"
        with path.open("rb") as file:
            *present, rest = file.read().split(b"\n")
            for timed in stamp(
                _decoded(present[-tail:] if tail else present if tail is None else [])
            ):
                yield timed
            ended = not follow
            while not ended:
                await asyncio.sleep(POLL_SECONDS)
                # Checked before the last lines are read, so that no line is missed.
                ended = self._has_ended(stream)
                *whole, rest = (rest + file.read()).split(b"\n")
                for line in _decoded(whole):
                    yield datetime.now(UTC), line
            for line in _decoded([rest] if rest else []):
                yield datetime.now(UTC), line

    def _has_ended(self, stream: LogStream) -> bool:
        """Return True if the pod is gone or has ended; its state is saved after its last line."""
        pod = self._state().pods.get(stream.pod)
        return pod is None or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")

    def _state(self) -> State:
        if not (self._directory / run_directory.JOB).exists():
            raise ReadError(
                f"{self._directory}: no {run_directory.JOB} there; expected the directory of a run "
                "(sluice run)"
            )
        try:
            return StateFile(self._directory).load()
        except RunDirectoryError as error:
            raise ReadError(str(error)) from error


def _decoded(lines: Iterable[bytes]) -> list[str]:
    return [line.decode(errors="replace") for line in lines]


def stamp(lines: Iterable[str]) -> Iterator[TimedLine]:
    """Yield each line with the time at which it was written, as far as the lines say so.

    A line without a time, such as one of a traceback, gets the time of the line before it. Lines
    before the first time get that time.
    """
    waiting: list[str] = []
    last: datetime | None = None
    for line in lines:
        last = _moment(line) or last
        if last is None:
            waiting.append(line)
            continue
        yield from ((last, earlier) for earlier in waiting)
        waiting.clear()
        yield last, line
    yield from ((datetime.now(UTC), untimed) for untimed in waiting)


def _moment(line: str) -> datetime | None:
    # sluice's times are in UTC and end in Z; SGLang's, in brackets, are in local time.
    match = _UTC.match(line)
    if match:
        return datetime.fromisoformat(match.group(1)).replace(tzinfo=UTC)
    match = _LOCAL.match(line)
    return datetime.fromisoformat(match.group(1).replace(",", ".")).astimezone() if match else None


def _stream(path: Path) -> LogStream | None:
    """Return the stream of a file `<job>-<role>-<replica>-<attempt>-<index>.<container>.log`.

    None if the file is not the log of a container.
    """
    pod, _, container = path.stem.partition(".")
    parts = pod.rsplit("-", 4)
    if len(parts) != 5 or not all(part.isdigit() for part in parts[2:]):
        return None
    return LogStream(pod, container, parts[1], int(parts[2]), int(parts[3]), int(parts[4]))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            # A kill may cut off the last line.
            continue
