"""The folder in which `sluice run` keeps the runs of this machine.

Every start of the command line imports this module, so its imports must be quick.
"""

from __future__ import annotations

from pathlib import Path

RUNS = Path("runs")


def run_names(prefix: str = "") -> list[str]:
    """Sorted names of the runs in `RUNS` that begin with `prefix`."""
    return sorted(
        path.parent.name for path in RUNS.glob("*/job.json") if path.parent.name.startswith(prefix)
    )
