"""Where `sluice` begins. Ctrl-C while modules are still being imported ends it without a
traceback, so nothing that takes time is imported above.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

STOPPED = 130


def _stop(_number: int, _frame: FrameType | None) -> None:
    sys.exit(STOPPED)


def main() -> None:
    """Run the command that the arguments name. Whoever started it with SIGINT ignored, as a shell
    does in the background, has it ignored.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _stop)
    from sluice_cli.main import app

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(STOPPED)
