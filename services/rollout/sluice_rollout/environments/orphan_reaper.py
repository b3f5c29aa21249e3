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

MARK = "SLUICE_EPISODE"  # variable of a process: its episode's directory
LABEL = "sluice.dev/episodes"  # label of a container: the directory of its worker's episodes
END_SECONDS = 10.0
_LOOK_SECONDS = 0.2


class SurvivorError(Exception):
    """Processes do not end. The message names them."""


def marked_processes(directory: str) -> list[int]:
    """Return the processes whose episode's directory is this one or is inside it."""
    mark = f"{MARK}={directory}".encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _has_mark(name, mark)]


def _has_mark(pid: str, mark: bytes) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False
    return any(text == mark or text.startswith(mark + b"/") for text in variables)


def end_processes(directory: str) -> None:
    """Kill all processes with a mark until they are gone. Raises SurvivorError after a while."""
    deadline = time.monotonic() + END_SECONDS
    while pids := marked_processes(directory):
        if time.monotonic() > deadline:
            raise SurvivorError(f"processes {pids} of {directory} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def end_containers(engine: str, directory: str) -> None:
    """Remove all containers of a worker. Raises SurvivorError if the engine does not answer."""
    label = f"label={LABEL}={directory}"
    if ids := run_engine(engine, "ps", "--all", "--quiet", "--filter", label).split():
        run_engine(engine, "rm", "--force", *ids)


def run_engine(engine: str, *words: str) -> str:
    """Run podman or docker. Returns its output. Raises SurvivorError if it does not answer."""
    import subprocess  # rarely needed, and as large as everything else here

    try:
        done = subprocess.run(
            [engine, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=END_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SurvivorError(f"`{engine} {words[0]}` does not answer") from error
    return done.stdout


def main(worker: int, directory: str, engine: str = "") -> None:
    """Wait until the worker is no longer this process's parent, then end its programs."""
    while os.getppid() == worker:
        time.sleep(_LOOK_SECONDS)
    end_processes(directory)
    if engine:
        end_containers(engine, directory)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
