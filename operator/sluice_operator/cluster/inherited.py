"""What containers on a laptop get from the process that hosts them."""

from __future__ import annotations

import os


def inherited_env() -> dict[str, str]:
    """The host's environment, but for the variables of a job that the host itself may be part of."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    return env | {"PYTHONUNBUFFERED": "1"}  # a log that lags behind cannot tell why its process died
