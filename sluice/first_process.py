"""The first process of a container, which the kernel spares signals that it has no handler for.

While it starts it has none. A pod that is deleted then would ignore that until the end of its
grace: a trainer's that waits for those of other machines, for five minutes.
"""

from __future__ import annotations

import os
import signal


def end_when_told() -> None:
    """End by SIGTERM, as any other process does, until there is a handler that does more."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
