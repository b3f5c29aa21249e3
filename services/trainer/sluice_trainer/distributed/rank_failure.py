"""The exit of a rank that lost another rank, distinct from the exit of the rank that failed."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from sluice.runtime import error_summary
from sluice.telemetry import logs

# Exit code of a rank that lost another one (docs/contracts.md).
EXIT_PEER_LOST = 3


def message(error: BaseException) -> str:
    """Return one line for people if a collective failed because a rank is gone; else empty.

    torch's message names a line of C++ and refers people to other logs.
    """
    sign = error_summary.lost_peer(str(error)) if isinstance(error, RuntimeError) else ""
    return f"another rank of the trainer is gone ({sign}); its own pod says why" if sign else ""


def end(reason: str) -> NoReturn:
    """End this process with EXIT_PEER_LOST and `reason` as its last line."""
    logs.print_error(reason)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # The process group is not destroyed: its threads may abort the process over the broken
    # connection (`terminate called without an active exception`), which would hide the reason.
    os._exit(EXIT_PEER_LOST)
