"""Finds and kills the processes of a run by a marker in their environment."""

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
    """Return the marker of a container, or the prefix that all markers of a run or pod share."""
    text = f"{run_dir}//"
    if pod:
        text += f"{pod}/"
    return text + (f"{container}/" if container else "")


def marked(prefix: str) -> list[int]:
    """Return the living processes of this machine whose marker starts with `prefix`."""
    variable = f"{MARKER}={prefix}".encode()
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # has ended meanwhile, or belongs to another user
            # The environment of a zombie is empty, so zombies are skipped.
            if environment.startswith(variable) or b"\0" + variable in environment:
                pids.append(int(entry))
    return pids


async def kill_marked(prefix: str, seconds: float = 10.0) -> int:
    """Kill all marked processes until all are gone, and return how many there were.

    Raises
    ------
    OrphanError
        Some of them are still alive after `seconds`.

    """
    deadline = time.monotonic() + seconds
    seen: set[int] = set()
    while left := marked(prefix):
        if time.monotonic() >= deadline:
            raise OrphanError(f"processes {left} of {prefix} do not die")
        seen |= set(left)
        for pid in left:
            # It may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)
    return len(seen)


def reap_adopted(children: set[int]) -> None:
    """Reap zombies that this process has adopted from a supervisor that was killed.

    children: pids that this process has started and waits for. Children of other parts of this
    process share its session; those of pods never do.
    """
    me, session = os.getpid(), os.getsid(0)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in children:
            try:
                fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # has ended meanwhile
            if fields[0] == b"Z" and int(fields[1]) == me and int(fields[3]) != session:
                os.waitpid(int(entry), os.WNOHANG)
