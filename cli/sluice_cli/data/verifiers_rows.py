"""Read the tasks of a verifiers environment as rows."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from sluice.api.groups.environment import Verifiers
from sluice.data.files import Row
from sluice.runtime.pod_env import ConfigurationError
from sluice_rollout.environments import package_environments

# Last lines of the interpreter's errors that a message shows.
_SHOWN_LINES = 10


def rows_of(
    name: str, arguments: dict[str, Any], python: str | None, max_rows: int | None
) -> Iterator[Row]:
    """Yield the rows that an interpreter with verifiers prints.

    Parameters
    ----------
    name, arguments
        Id of the taskset, and fields of its configuration.
    python
        The interpreter. Default: the one that runs this process.
    max_rows
        Stop after this many rows. Default: all.

    Raises
    ------
    ConfigurationError
        If the interpreter does not start, or fails; with its last lines.

    """
    command = package_environments.verifiers_rows_command(
        Verifiers(name=name, args=arguments, python=python)
    )
    command += [str(max_rows)] if max_rows else []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        except OSError as error:
            raise ConfigurationError(f"--python {command[0]}: {error.strerror}") from error
        with process:
            assert process.stdout
            yield from map(json.loads, process.stdout)
        if process.returncode:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-_SHOWN_LINES:]
            raise ConfigurationError("\n".join([f"verifiers {name} yields no rows:", *last]))
