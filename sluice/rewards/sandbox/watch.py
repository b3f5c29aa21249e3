"""A watch over a running program: its output, its time,
and what no layer of the kernel counts everywhere.

Standard library only. Threads and files are looked at twenty times a second, so a program can have
more of them than the limit says for a moment. Where it has a user or a file system of its own the
kernel refuses them exactly.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass

from sluice.rewards.sandbox import tree
from sluice.rewards.sandbox.confine import DIRECTORY_BYTES, DIRECTORY_ENTRIES, THREADS

OUTPUT_BYTES = 4 << 20
_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """A program that has ended, or was ended.

    status: ok, error, timeout, output (too much of it), limit. excess: with limit, what it had too
    much of. data: what came through each channel.
    """

    status: str
    excess: str
    data: dict[int, bytes]


def watch(
    child: int, readers: dict[int, int], directory: str, seconds: float, *, group: bool = False
) -> ProgramEnd:
    """Wait for the end of `child`, or bring it about. readers: descriptor -> name of
    the channel. group: it leads a process group, which ends with it.
    """
    data = {name: bytearray() for name in readers.values()}
    open_ends = set(readers)
    now = time.monotonic()
    end, next_look = now + seconds, now + _LOOK_SECONDS
    status = excess = ""
    while not status:
        now = time.monotonic()
        if now >= next_look:
            excess = _excess(child, directory)
            next_look = time.monotonic() + _LOOK_SECONDS
        if excess:
            status = "limit"
        elif now >= end:
            status = "timeout"
        elif not open_ends:
            status = _exit_status(child)
        else:
            status = _read(open_ends, readers, data, max(min(end, next_look) - now, 0))
    if status in ("limit", "timeout", "output"):
        _kill(child)
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return ProgramEnd(status, excess, {name: bytes(part) for name, part in data.items()})


def _read(
    open_ends: set[int], readers: dict[int, int], data: dict[int, bytearray], seconds: float
) -> str:
    """Take in what there is. Returns "output" where that is too much, else ""."""
    ready, _, _ = select.select(list(open_ends), [], [], seconds)
    for descriptor in ready:
        part, kept = os.read(descriptor, 1 << 16), data[readers[descriptor]]
        kept += part
        if not part:
            open_ends.discard(descriptor)
        elif len(kept) > OUTPUT_BYTES:
            return "output"
    return ""


def _exit_status(child: int) -> str:
    """How a process ended that has closed its outputs: ok, error or timeout;
    "" where it still runs.
    """
    pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        time.sleep(_PAUSE_SECONDS)
        return ""
    code = os.waitstatus_to_exitcode(status)
    return "ok" if code == 0 else "timeout" if code == -signal.SIGXCPU else "error"


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # it had ended, and was waited for
        os.waitpid(child, 0)


def _excess(child: int, directory: str) -> str:
    if _threads(child) > THREADS:
        return f"more than {THREADS} threads"
    return tree.excess(directory, entries=DIRECTORY_ENTRIES, size=DIRECTORY_BYTES)


def _threads(child: int) -> int:
    try:
        with open(f"/proc/{child}/stat") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended
    return int(text.rpartition(")")[2].split()[17])
