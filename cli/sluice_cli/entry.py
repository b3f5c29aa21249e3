"""Where `sluice` begins. Nothing that takes time is imported above: Ctrl-C ends it from here on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

STOPPED = 130


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(STOPPED)


@contextlib.contextmanager
def nothing_begun() -> Iterator[None]:
    """Modules are imported: Ctrl-C ends the process at once, since nothing is there to be undone.

    An exception would end in a traceback of whatever library is just being imported. Whoever
    started us with SIGINT ignored, as a shell does in the background, has it ignored.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not heeded:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Run the command that the arguments name."""
    with nothing_begun():
        from sluice_cli.main import app
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(STOPPED)
