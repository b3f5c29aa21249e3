"""Which trackers a run has, and the command of each."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sluice.api import RLJob
from sluice.api.groups.telemetry import TrackerSpec
from sluice.trackers import process


@dataclass(frozen=True, slots=True)
class TrackerSettings:
    """A tracker of a run.

    name: in logs, such as `wandb` or `mlflow-2`. position: name of the file that says what it has,
    which differs with the project.
    """

    name: str
    position: str
    python: str
    settings: dict[str, Any]

    def command(self, directory: Path, *, limit: int = process.FINISH_SECONDS) -> list[str]:
        """Return the command of the process that follows a run directory.

        limit: seconds for what is left at the end; 0: none.
        """
        words = [str(directory), self.position, json.dumps(self.settings), str(limit)]
        return [self.python, "-P", process.__file__, *words]


def trackers_of(job: RLJob, directory: Path, variables: Mapping[str, str]) -> list[TrackerSettings]:
    """Return the trackers of a run; without `telemetry.trackers` W&B, if variables configure it.

    Parameters
    ----------
    job
        The job.
    directory
        The run directory. A run is the same in a tracker as long as job and directory are.
    variables
        Environment of the process.

    """
    specs = job.spec.telemetry.trackers
    if not specs and wandb_is_configured(variables):
        specs = [default_wandb(variables)]
    name = job.metadata.name
    identity = hashlib.blake2b(f"{name} {directory.resolve()}".encode(), digest_size=8).hexdigest()
    found: list[TrackerSettings] = []
    for spec in specs:
        kind = spec.type or "own"
        same = sum(tracker.name.partition("-")[0] == kind for tracker in found)
        place = f"{kind}.{quote(spec.project, safe='')}"
        again = sum(tracker.position.partition("#")[0] == place for tracker in found)
        found.append(
            TrackerSettings(
                f"{kind}-{same + 1}" if same else kind,
                f"{place}#{again + 1}" if again else place,
                str(Path(spec.python).expanduser()) if spec.python else sys.executable,
                {
                    "type": spec.type,
                    "function": spec.function,
                    "project": spec.project,
                    "name": spec.name or name,
                    "identity": identity,
                    "args": spec.args,
                    "sampleEverySteps": spec.sample_every_steps,
                },
            )
        )
    return found


def wandb_is_configured(variables: Mapping[str, str]) -> bool:
    mode = variables.get("WANDB_MODE")
    return mode != "disabled" and bool(variables.get("WANDB_API_KEY") or mode == "offline")


def default_wandb(variables: Mapping[str, str]) -> TrackerSpec:
    """Return W&B for a job that names no tracker: prompts and responses stay where they are."""
    project = variables.get("WANDB_PROJECT")
    named = {"project": project} if project else {}
    return TrackerSpec.model_validate({"type": "wandb", "sampleEverySteps": 0, **named})
