"""The time of day, read once at the start of the process and then counted by a monotonic clock.

NTP, a person or the host of a virtual machine may set the machine's clock at any moment. Code that
compares times of day which it wrote itself uses this clock, so that a jump neither fires a deadline
nor makes a duration negative.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

_START = time.time() - time.monotonic()


def seconds() -> float:
    """Seconds since 1970."""
    return _START + time.monotonic()


def now() -> datetime:
    return datetime.fromtimestamp(seconds(), UTC)
