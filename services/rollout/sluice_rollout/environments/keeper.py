"""Ends what programs of episodes have started, by the variable that all of it carries.

As a program (`python keeper.py PID DIRECTORY`) it waits for the end of its worker, which may have
been killed, and then ends the programs of all its episodes. Standard library only, to be small.
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
_LOOK_SECONDS = 0.2
_END_SECONDS = 10.0


class SurvivorError(Exception):
    """Processes cannot be ended. The message names them."""


def marked(directory: str) -> list[int]:
    """Living processes whose episode's directory is this one, or lies in it."""
    at = f"{MARK}={directory}".encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _carries(name, at)]


def _carries(pid: str, mark: bytes) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
    return any(each == mark or each.startswith(mark + b"/") for each in variables)


def end(directory: str) -> None:
    """Kill all of them, until none is left. Raises SurvivorError where that takes long."""
    deadline = time.monotonic() + _END_SECONDS
    while pids := marked(directory):
        if time.monotonic() > deadline:
            raise SurvivorError(f"processes {pids} of {directory} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def main(worker: int, directory: str) -> None:
    """Wait until this process's parent is no longer the worker; then end its programs."""
    while os.getppid() == worker:
        time.sleep(_LOOK_SECONDS)
    end(directory)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
