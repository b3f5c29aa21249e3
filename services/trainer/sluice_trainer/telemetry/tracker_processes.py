"""The processes of a run's trackers, which the trainer starts, watches and ends."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from sluice.telemetry import logs
from sluice.trackers.following import Follower
from sluice.trackers.process import FINISH_SECONDS
from sluice.trackers.settings import TrackerSettings

# Pause before a tracker that ended is started again; it doubles up to the second.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 30.0, 600.0
_TAIL_BYTES = 4096


class TrackerProcess:
    """A tracker's process. It is never waited for, except at the end of the run.

    Parameters
    ----------
    directory
        The run directory.
    tracker
        The tracker.

    """

    def __init__(self, directory: Path, tracker: TrackerSettings) -> None:
        self._directory = directory
        self._tracker = tracker
        self._log = directory / "logs" / f"tracker-{tracker.name}.log"
        self._pause = _PAUSE_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self.watch()

    def watch(self) -> None:
        """Start the process, if it does not run and has not just ended."""
        if self._process is not None and self._process.poll() is not None:
            self._warn(f"it is started again in {self._pause:g} s, and nothing is lost")
            self._process, self._not_before = None, time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        if self._process is None and time.monotonic() >= self._not_before:
            self._start()

    def finish(self) -> None:
        """Ask the process to send what is left. Does not wait for it."""
        if self._process is None:
            self._start()  # one last try
        if self._process is not None and self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait for the process, and say what it did not send."""
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        left = Follower(self._directory, self._tracker.position, 0).left()
        if left:
            self._warn(f"{left} records were not sent; `sluice track {self._directory}` sends them")

    def _start(self) -> None:
        self._log.parent.mkdir(exist_ok=True)
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._tracker.command(self._directory),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
        except OSError as error:
            self._not_before = time.monotonic() + self._pause
            logs.get().warning(f"tracker {self._tracker.name} cannot start: {error}")

    def _warn(self, consequence: str) -> None:
        reason = last_line(self._log)
        logs.get().warning(
            f"tracker {self._tracker.name} ended: {consequence}", reason=reason, log=str(self._log)
        )


def close(processes: Sequence[TrackerProcess]) -> None:
    """End all trackers, at the same time."""
    for process in processes:
        process.finish()
    end = time.monotonic() + FINISH_SECONDS + 5
    for process in processes:
        process.wait(max(0.0, end - time.monotonic()))


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    with contextlib.suppress(OSError):
        lines = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
