"""A process that is the first one of its process namespace, as in a container."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from sluice.runtime import pid1
from tests.tools import missing

T = TypeVar("T")


@contextmanager
def started_first(
    words: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """Python with these arguments, once SIGTERM is not lost on it; behind the process that made
    the namespace, which ends with its status.
    """
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        missing("needs the right to make a process namespace")
    with subprocess.Popen([*apart, sys.executable, *words], env=environment) as outer:
        try:
            first = until(lambda: psutil.Process(outer.pid).children(), "first process")[0]
            until(lambda: _heeds(first, signal.SIGTERM), "handler")
            yield outer, first
        finally:
            outer.kill()


def until(look: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    end = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < end, f"no {what} in {seconds:g} s"
        time.sleep(0.02)
    return seen


def _heeds(process: psutil.Process, number: int) -> bool:
    """True if a process is the init of `pid1` or has a handler for this signal.

    The init's mask in /proc does not say so: `unshare` blocks SIGTERM for a moment before it, and
    signals that a process awaits in `sigwait` are not shown as blocked.
    """
    if pid1.__file__ in process.cmdline():
        return True
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (handled,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(handled >> (number - 1) & 1)
