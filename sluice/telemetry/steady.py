"""The time of day as this process counts it: read once at its start,
then counted by a monotonic clock.

Somebody may set the machine's clock at any moment: NTP after a boot, a person, the host of a
virtual machine. What decides by times of day, or tells durations by them, and wrote them itself,
uses this clock: no deadline fires because of a jump, and no duration is an hour or negative.
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
