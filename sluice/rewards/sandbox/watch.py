"""Watch a running program: its output, its time, and limits that the kernel cannot always enforce.

Standard library only. Threads and files are counted twenty times a second, so a program can exceed
these limits for a moment. With a separate user or file system, the kernel enforces them exactly.
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
    """End of a program.

    Attributes
    ----------
    status
        ok, error, timeout, output (too much of it), or limit.
    excess
        The exceeded limit, if the status is limit.
    data
        Bytes received per channel.

    """

    status: str
    excess: str
    data: dict[int, bytes]


def watch(
    child: int, readers: dict[int, int], directory: str, seconds: float, *, group: bool = False
) -> ProgramEnd:
    """Wait for the end of a program, and kill it at a limit.

    Parameters
    ----------
    child
        Its pid.
    readers
        Channel by descriptor to read from.
    directory
        Directory whose size is limited.
    seconds
        Time limit.
    group
        True if the program leads a process group, which is killed with it.

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
    """Read available output. Returns "output" if there is too much, "" otherwise."""
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
    """Return ok, error or timeout for a process that has closed its output; "" while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        time.sleep(_PAUSE_SECONDS)
        return ""
    code = os.waitstatus_to_exitcode(status)
    return "ok" if code == 0 else "timeout" if code == -signal.SIGXCPU else "error"


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # it had already ended
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
        return 0  # the process has ended
    return int(text.rpartition(")")[2].split()[17])
