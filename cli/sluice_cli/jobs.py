"""Where a job that somebody names is: in a cluster, or in a run directory of this machine.

The Kubernetes client is loaded only when a cluster is asked.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from sluice.environment import ConfigurationError
from sluice.telemetry.run_directory import JOB
from sluice_operator.cluster.local.reader import RunReader
from sluice_operator.cluster.view import Reader, ReadError

RUNS = Path("runs")


@contextlib.asynccontextmanager
async def reading(
    name: str | None, namespace: str | None, run_dir: Path | None
) -> AsyncIterator[Reader]:
    """The job's reader: of `run_dir`; else of runs/NAME, if there is one and no namespace is given;
    else of a cluster.

    ReadError, with what to do: it cannot be read.
    """
    directory = run_dir or _run_of(name, namespace)
    if directory is not None:
        yield RunReader(directory)
        return
    if name is None:
        raise ReadError("say which job: its NAME, or --run-dir DIR")
    from sluice_operator.cluster.kube.reader import connect

    logging.getLogger("kubernetes").setLevel(logging.ERROR)  # what it warns of is told by the error
    try:
        async with connect(name, namespace) as reader:
            yield reader
    except ConfigurationError as error:
        here = "" if namespace else f"there is no run in {RUNS / name}, and "
        raise ReadError(f"{here}{error}; or give --run-dir DIR") from error


def _run_of(name: str | None, namespace: str | None) -> Path | None:
    directory = RUNS / name if name and namespace is None else None
    return directory if directory is not None and (directory / JOB).exists() else None
