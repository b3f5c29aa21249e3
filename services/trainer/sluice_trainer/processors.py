"""How many processors this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_processors(quota: Path = _QUOTA) -> int:
    """Processors that the kernel lets us run on, or fewer where the container has a CPU limit.

    quota: cgroup v2's file, "MICROSECONDS PERIOD" or "max PERIOD".
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text().split()
    except FileNotFoundError:  # no cgroup v2, or its root
        return allowed
    return allowed if limit == "max" else max(min(allowed, int(limit) // int(period)), 1)
