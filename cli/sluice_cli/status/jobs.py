"""Where jobs are: in a cluster, or in run directories of this machine.

The Kubernetes client is loaded only when a cluster is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry.run_directory import JOB
from sluice_cli.options import RUNS, runs_here
from sluice_operator.cluster.local.reader import RunReader
from sluice_operator.cluster.view import MissingJobError, Reader, ReadError
from sluice_operator.plan import KubeObject

LIST_SECONDS = 10.0
"""Deadline for the answer of a cluster that nobody asked for."""


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
    except (ConfigurationError, MissingJobError) as error:
        here = "" if namespace else f"{_no_run(name)}, and "
        raise ReadError(f"{here}{error}; or give --run-dir DIR") from error


def _no_run(name: str) -> str:
    runs = ", ".join(runs_here(""))
    return f"there is no run in {RUNS / name}" + (f" (runs here: {runs})" if runs else "")


async def stored(namespace: str | None, *, everywhere: bool) -> tuple[list[KubeObject], str]:
    """Jobs of a cluster; and why there are none, where there is a cluster and it does not tell.

    Raises ReadError where a cluster was asked for.
    """
    try:
        async with asyncio.timeout(LIST_SECONDS):
            return await _stored(namespace, everywhere), ""
    except (ReadError, TimeoutError, ModuleNotFoundError) as error:
        if namespace or everywhere:
            raise
        if isinstance(error, ModuleNotFoundError):
            return [], ""
        return [], str(error) or f"no answer from the API server within {LIST_SECONDS:g} s"


async def _stored(namespace: str | None, everywhere: bool) -> list[KubeObject]:
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
