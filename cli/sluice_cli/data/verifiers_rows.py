"""The tasks of an environment of verifiers, as rows."""

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

_SHOWN_LINES = 10
"""Of what the interpreter says last."""


def rows_of(
    name: str, arguments: dict[str, Any], python: str | None, most: int | None
) -> Iterator[Row]:
    """The rows, as an interpreter that has verifiers writes them. Raises ConfigurationError."""
    words = package_environments.verifiers_rows_command(
        Verifiers(name=name, args=arguments, python=python)
    )
    words += [str(most)] if most else []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
        except OSError as error:
            raise ConfigurationError(f"--python {words[0]}: {error.strerror}") from error
        with process:
            assert process.stdout
            yield from map(json.loads, process.stdout)
        if process.returncode:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-_SHOWN_LINES:]
            raise ConfigurationError("\n".join([f"verifiers {name} gives no rows:", *last]))
