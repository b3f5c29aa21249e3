"""Processors and threads of a process that computes on CPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Hidden size from which a model gains by threads: with two, SmolLM2-135M (576) trains and generates
# nearly twice as fast on two cores. A tiny model gains little, and becomes 10 to 40 times slower on
# a busy machine, where threads wait for each other.
WIDE = 256
# Variables for processes that load user code: mathematical libraries compute on one core. Without
# them they start a thread for each core of the node, however few the pod may use. A thread takes
# 64 MiB or more of address space, so a memory limit that is enough on a laptop is too small for
# `import numpy` on a node of 64 cores; and a process that has threads cannot be forked. Many such
# processes run at a time, so more threads would gain nothing.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_processors(quota: Path = _QUOTA) -> int:
    """Return the processors that this process may use, within the container's CPU limit.

    `quota` is the file of cgroup v2: "MICROSECONDS PERIOD" or "max PERIOD".
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text().split()
    except FileNotFoundError:  # no cgroup v2, or its root
        return allowed
    return allowed if limit == "max" else max(min(allowed, int(limit) // int(period)), 1)


def threads(config: Mapping[str, Any], present: int, processes: int = 1) -> int:
    """Return the number of threads for one of `processes` that compute a model together.

    Parameters
    ----------
    config
        The model's config.json.
    present
        Threads that the process was given. More than one is the user's choice, and kept.
    processes
        Processes that share the processors.

    """
    width = config.get("text_config", config).get("hidden_size") or 0
    return present if present > 1 or width < WIDE else max(usable_processors() // processes, 1)
