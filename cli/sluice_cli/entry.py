"""Entry point of `sluice`, without slow imports: Ctrl-C works from the first moment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

# Exit code of a process that Ctrl-C ended.
STOPPED = 130


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(STOPPED)


@contextlib.contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once, while modules are imported and there is no cleanup to do.

    An exception would print a traceback of the library that is being imported. A process that was
    started with SIGINT ignored, as shells do for background jobs, keeps ignoring it.
    """
    handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not handles_interrupts:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Run the command that the arguments name."""
    with exit_on_interrupt():
        from sluice_cli.main import app
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(STOPPED)
