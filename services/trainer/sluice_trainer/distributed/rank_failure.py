"""The end of a rank that lost another one, told apart from the end that has the reason."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from sluice.runtime import error_summary
from sluice.telemetry import logs

EXIT_PEER_LOST = 3
"""docs/contracts.md"""


def words(error: BaseException) -> str:
    """One line for people where a collective failed for want of another rank; empty: it failed
    otherwise.

    torch's own words are those of a C++ file, and send people to other logs.
    """
    sign = error_summary.lost_peer(str(error)) if isinstance(error, RuntimeError) else ""
    return f"another rank of the trainer is gone ({sign}); its own pod says why" if sign else ""


def end(reason: str) -> NoReturn:
    """End this process with EXIT_PEER_LOST, and `reason` in its last line.

    The process group is not taken down: with a connection that broke, its threads may abort the
    process (`terminate called without an active exception`), and that would be told as the cause.
    """
    logs.last_words(reason)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(EXIT_PEER_LOST)
