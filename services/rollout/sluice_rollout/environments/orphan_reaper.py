"""Ends the processes of episodes, found by an environment variable that all of them inherit.

As a program (`python orphan_reaper.py PID DIRECTORY [ENGINE]`) it waits for the end of its worker,
which may be killed at any time, and then ends the programs of all its episodes. If ENGINE is podman
or docker, it removes the containers as well: their processes may belong to another user.

The program uses the standard library only, to stay small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

MARK = "SLUICE_EPISODE"
"""The variable that names an episode's directory."""
LABEL = "sluice.dev/episodes"
"""Label of a container: the directory in which those of all episodes of its worker are."""
END_SECONDS = 10.0
_LOOK_SECONDS = 0.2


class SurvivorError(Exception):
    """Processes cannot be ended. The message names them."""


def marked_processes(directory: str) -> list[int]:
    """Living processes whose episode's directory is this one, or lies in it."""
    at = f"{MARK}={directory}".encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _has_mark(name, at)]


def _has_mark(pid: str, mark: bytes) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
    return any(each == mark or each.startswith(mark + b"/") for each in variables)


def end_processes(directory: str) -> None:
    """Kill all of them, until none is left. Raises SurvivorError where that takes long."""
    deadline = time.monotonic() + END_SECONDS
    while pids := marked_processes(directory):
        if time.monotonic() > deadline:
            raise SurvivorError(f"processes {pids} of {directory} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def end_containers(engine: str, directory: str) -> None:
    """Remove all containers of a worker, whatever they do. Raises SurvivorError as `end` does."""
    label = f"label={LABEL}={directory}"
    if ids := run_engine(engine, "ps", "--all", "--quiet", "--filter", label).split():
        run_engine(engine, "rm", "--force", *ids)


def run_engine(engine: str, *words: str) -> str:
    """The output of podman or docker. Raises SurvivorError where it does not answer."""
    import subprocess  # seldom needed, and as much to load as all the rest

    try:
        done = subprocess.run(
            [engine, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=END_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SurvivorError(f"`{engine} {words[0]}` does not answer") from error
    return done.stdout


def main(worker: int, directory: str, engine: str = "") -> None:
    """Wait until this process's parent is no longer the worker; then end its programs."""
    while os.getppid() == worker:
        time.sleep(_LOOK_SECONDS)
    end_processes(directory)
    if engine:
        end_containers(engine, directory)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
