"""Metrics to Weights & Biases, if its library is installed (extra `wandb`) and configured.

Only the environment configures it: WANDB_API_KEY or WANDB_MODE=offline turns it on; WANDB_PROJECT,
WANDB_ENTITY, WANDB_BASE_URL and others are read by the library. Otherwise nothing is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.runtime.extras import install_command
from sluice.telemetry import logs

PROJECT = "sluice"
INIT_SECONDS = 60.0


class Wandb:
    """A W&B run for one run directory. A restarted trainer continues the same run."""

    def __init__(
        self, directory: Path, name: str, config: dict[str, Any], variables: Mapping[str, str]
    ) -> None:
        import wandb

        self._teardown = wandb.teardown
        identity = hashlib.blake2b(
            f"{name} {directory.resolve()}".encode(), digest_size=8
        ).hexdigest()
        self._run = wandb.init(
            project=variables.get("WANDB_PROJECT", PROJECT),
            name=name,
            id=variables.get("WANDB_RUN_ID", identity),
            resume="allow",
            dir=directory,
            config=config,
            settings=wandb.Settings(init_timeout=INIT_SECONDS, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric(
            "*", step_metric="step"
        )  # a step may be logged again, which wandb's own counter does not allow

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()
        # finish() returns before the library's process has written its file; teardown waits for it.
        self._teardown()


def start(
    directory: Path, name: str, config: dict[str, Any], variables: Mapping[str, str]
) -> Wandb | None:
    """Start the W&B run; None if it is not configured or cannot start.

    Training does not depend on it, so errors are only logged.
    """
    configured = variables.get("WANDB_API_KEY") or variables.get("WANDB_MODE") == "offline"
    if not configured or variables.get("WANDB_MODE") == "disabled":
        return None
    if importlib.util.find_spec("wandb") is None:
        logs.get().warning(
            f"WANDB_API_KEY is set, but wandb is not installed: {install_command('wandb')}"
        )
        return None
    try:
        return Wandb(directory, name, config, variables)
    except Exception as error:  # wandb raises its own, requests' and other errors
        logs.get().warning("no run at Weights & Biases", error=f"{type(error).__name__}: {error}")
        return None
