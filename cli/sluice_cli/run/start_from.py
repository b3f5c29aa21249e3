"""`sluice run --from RUN`: start a run with the model of another run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from sluice.api import ManifestError
from sluice.telemetry.run_directory import JOB
from sluice_client.runs import RUNS

CHECKPOINTS, EXPORTED = "checkpoints", "hf"


def model_of(run: Path) -> list[str]:
    """Return the overrides with which a job starts from a run's model.

    The model is the final one. If the run has not ended, the newest checkpoint is converted to a
    Hugging Face checkpoint in the folder of the checkpoints.

    Parameters
    ----------
    run
        A run directory, or the name of a run.

    Raises
    ------
    ManifestError
        If there is no such run, or it has no model yet.

    """
    directory = run if (run / JOB).exists() else RUNS / run
    if not (directory / JOB).exists():
        raise ManifestError(
            f"--from {run}: {directory} has no {JOB}; expected the directory or the name of a run"
        )
    model = directory / CHECKPOINTS / EXPORTED
    if not (model / "config.json").exists():
        model = _converted(directory)
    return [f"model.path={json.dumps(str(model.resolve()))}", "model.init=pretrained"]


def _converted(directory: Path) -> Path:
    spec = _spec(directory / JOB)
    newest: Path | str | None = spec.get("checkpoint", {}).get("to")
    if newest is not None:  # the conversion takes the newest in the store
        target = directory / CHECKPOINTS / f"{EXPORTED}_newest"
        shutil.rmtree(target, ignore_errors=True)
    else:
        newest = max((directory / CHECKPOINTS).glob("iter_*"), default=None)
        if newest is None:
            raise ManifestError(f"--from {directory}: the run has no model and no checkpoint yet")
        target = newest.with_name(f"{EXPORTED}_{newest.name.removeprefix('iter_')}")
    # An earlier start may have converted this checkpoint.
    if not (target / "config.json").exists():
        # Conversion needs torch, which the command line does not import.
        arguments = ["dist-to-hf", newest, spec["model"]["path"], target]
        command = [sys.executable, "-W", "ignore", "-m", "sluice_trainer.convert"]
        done = subprocess.run([*command, *map(str, arguments)], check=False)
        if done.returncode:
            raise ManifestError(f"--from {directory}: {newest} could not be converted")
    return target


def _spec(path: Path) -> dict[str, Any]:
    try:
        spec: dict[str, Any] = json.loads(path.read_text())["spec"]
    except (OSError, ValueError, KeyError) as error:
        raise ManifestError(f"{path}: expected the manifest of a run ({error})") from error
    return spec
