"""Processors and threads of a process that computes on CPUs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WIDE = 256
"""Hidden size of a model that gains by threads: with two, SmolLM2-135M (576) trains and generates
nearly twice as fast on two cores. A tiny one gains little, and on a busy machine, where threads
wait for each other, it becomes 10 to 40 times slower."""
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


def threads(config: Mapping[str, Any], present: int, processes: int = 1) -> int:
    """Threads for one of so many processes that compute a model together.

    config: its config.json. present: threads that the process was given; with more than one it
    keeps them, as somebody has chosen.
    """
    width = config.get("text_config", config).get("hidden_size") or 0
    return present if present > 1 or width < WIDE else max(usable_processors() // processes, 1)
