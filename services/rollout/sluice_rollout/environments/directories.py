"""The directories of a worker's episodes, and the process that cleans up after a killed worker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from sluice.rewards.sandbox import hide, scratch, tree
from sluice.runtime import open_files
from sluice.telemetry import failure_log, logs
from sluice_rollout.environments import inputs, orphan_reaper

PREFIX = "sluice-episodes-"
# Descriptors: pipes of the program, its connections to the gateway, and theirs to the engine.
_FILES_PER_EPISODE = 8
_OTHER_FILES = 1024
_END_SECONDS = 5.0


@contextlib.contextmanager
def open_root(programs: int, engine: str | None = None) -> Iterator[str]:
    """Make the directory for a worker's episodes, and remove those of workers that were killed.

    All programs end when the context ends, or when the worker is killed.

    Parameters
    ----------
    programs
        Number of programs that run at once.
    engine
        Container engine of the programs, or None.

    """
    # `sluice run` has to find this process by its variables; elsewhere hide them: they contain the
    # job's token.
    if inputs.POD not in os.environ:
        hide()
    open_files.raise_limit(_FILES_PER_EPISODE * programs + _OTHER_FILES)
    with scratch.directory(PREFIX) as directory:
        guard = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", orphan_reaper.__file__),
                *(str(os.getpid()), directory, *([engine] if engine else [])),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=inputs.engine_variables() if engine else {},
            start_new_session=True,
        )
        try:
            yield directory
        finally:
            _end(directory, engine)
            guard.kill()
            guard.wait(_END_SECONDS)


def _end(directory: str, engine: str | None) -> None:
    try:
        orphan_reaper.end_processes(directory)
        if engine:
            orphan_reaper.end_containers(engine, directory)
    except orphan_reaper.SurvivorError as error:
        logs.get().error("programs have not ended with their worker", error=str(error))


def remove(directory: str) -> None:
    """Remove the directory of a program that has ended."""
    try:
        with contextlib.suppress(FileNotFoundError):  # the worker has removed it already
            tree.remove(directory)
    except OSError as error:  # the next worker tries again
        failure_log.LOG.note("the directory of an episode cannot be removed", error)
