"""What containers on a laptop get from the process that hosts them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from sluice_operator.plan.engine import SHIMS_ENV


def inherited_env() -> dict[str, str]:
    """The host's environment, but for the variables of a job that the host itself may be part of."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    return env | {"PYTHONUNBUFFERED": "1"}  # a log that lags behind cannot tell why its process died


def sglang_cpu_shims() -> str:
    """Directory of what SGLang needs on CPU, in the rollout package; found without importing it."""
    chosen = os.environ.get(SHIMS_ENV)
    if chosen:
        return chosen
    spec = importlib.util.find_spec("sluice_rollout")
    places = list(spec.submodule_search_locations or []) if spec else []
    return str(Path(places[0]) / "sglang_cpu") if places else ""
