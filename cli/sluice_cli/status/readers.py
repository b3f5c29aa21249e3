"""Find a job in a cluster, or in a run directory of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry.run_directory import JOB
from sluice_client.runs import RUNS, run_names
from sluice_operator.cluster.local.reader import RunReader
from sluice_operator.cluster.view import MissingJobError, Reader, ReadError
from sluice_operator.plan import KubeObject

# Seconds that `sluice list` waits for a cluster which the user did not name.
LIST_SECONDS = 10.0


@contextlib.asynccontextmanager
async def job_reader(
    name: str | None, namespace: str | None, run_dir: Path | None
) -> AsyncIterator[Reader]:
    """Open a job for reading.

    The job is that of `run_dir` if given; else that of runs/NAME, if this directory holds a run
    and no namespace is given; else that of a cluster. Raises ReadError, whose text says what to do.
    """
    directory = run_dir or _run_of(name, namespace)
    if directory is not None:
        yield RunReader(directory)
        return
    if name is None:
        raise ReadError("name a job: NAME or --run-dir DIR")
    # The Kubernetes client is optional and slow to import.
    from sluice_operator.cluster.kube.reader import connect

    logging.getLogger("kubernetes").setLevel(logging.ERROR)  # our error says what it warns of
    try:
        async with connect(name, namespace) as reader:
            yield reader
    except (ConfigurationError, MissingJobError) as error:
        no_run = "" if namespace else f"{_no_run(name)}, and "
        raise ReadError(f"{no_run}{error}; or give --run-dir DIR") from error


def _no_run(name: str) -> str:
    runs = ", ".join(run_names())
    return f"there is no run in {RUNS / name}" + (f" (runs: {runs})" if runs else "")


async def jobs_of_cluster(
    namespace: str | None, *, everywhere: bool
) -> tuple[list[KubeObject], str]:
    """List a cluster's jobs, and say why the list is empty if the cluster cannot be read.

    Raises ReadError if the caller asks for a namespace or for all of them.
    """
    try:
        async with asyncio.timeout(LIST_SECONDS):
            return await _jobs_of_cluster(namespace, everywhere), ""
    except (ReadError, TimeoutError, ModuleNotFoundError) as error:
        # The user asked for the cluster, so its silence is an error and no note.
        if namespace or everywhere:
            raise
        if isinstance(error, ModuleNotFoundError):
            return [], ""
        return [], str(error) or f"no answer from the API server within {LIST_SECONDS:g} s"


async def _jobs_of_cluster(namespace: str | None, everywhere: bool) -> list[KubeObject]:
    from sluice_operator.cluster.kube.reader import connect

    logging.getLogger("kubernetes").setLevel(logging.ERROR)
    try:
        async with connect("", namespace) as reader:
            return await reader.jobs(everywhere=everywhere)
    except ConfigurationError as error:
        if namespace or everywhere:
            raise ReadError(str(error)) from error
        return []


def _run_of(name: str | None, namespace: str | None) -> Path | None:
    directory = RUNS / name if name and namespace is None else None
    return directory if directory is not None and (directory / JOB).exists() else None
