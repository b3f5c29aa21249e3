"""Finding and killing the processes of a run by the marker that all of them
carry in their environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

MARKER = "SLUICE_POD_ID"


class OrphanError(RuntimeError):
    """Processes of this run cannot be killed."""


def marker(run_dir: Path, pod: str = "", container: str = "") -> str:
    """Value of the marker; without pod or container: the prefix that all below it share."""
    text = f"{run_dir}//"
    if pod:
        text += f"{pod}/"
    return text + (f"{container}/" if container else "")


def marked(prefix: str) -> list[int]:
    """Living processes of this machine whose marker starts with `prefix`."""
    wanted = f"{MARKER}={prefix}".encode()
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile, or another user's
            # A zombie's environment is empty, so it is not found: it is dead already.
            if environment.startswith(wanted) or b"\0" + wanted in environment:
                pids.append(int(entry))
    return pids


async def kill_marked(prefix: str, seconds: float = 10.0) -> int:
    """Kill all of them, until none is left; how many there were."""
    deadline = time.monotonic() + seconds
    seen: set[int] = set()
    while left := marked(prefix):
        if time.monotonic() >= deadline:
            raise OrphanError(f"processes {left} of {prefix} do not die")
        seen |= set(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)
    return len(seen)


def reap_adopted(children: set[int]) -> None:
    """Collect the dead that this process has adopted from a supervisor that was killed.

    children: pids that this process has started itself and waits for. Children of other parts of
    this process share its session, those of pods never do.
    """
    me, session = os.getpid(), os.getsid(0)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in children:
            try:
                fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
            if fields[0] == b"Z" and int(fields[1]) == me and int(fields[3]) != session:
                os.waitpid(int(entry), os.WNOHANG)
