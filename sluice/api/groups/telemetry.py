"""Trackers of experiments that show the run besides its own files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import FreeForm, Model, NonNegativeInt, ObjectName
from sluice.api.schema.paths import CommandWord, UserFunction
from sluice.api.schema.rules import exactly_one

_Name = Annotated[str, Field(min_length=1, max_length=253)]


class SecretRef(Model):
    """Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")


class TrackerSpec(Model):
    """A tracker. Exactly one of `type` and `function`.

    It runs in a separate process, which reads the run directory: a tracker that is slow, hangs or
    dies does not hold up training, and is started again where it was.
    """

    type: Literal["wandb", "mlflow", "trackio", "swanlab"] | None = Field(
        None,
        description="Library: Weights & Biases, MLflow, Trackio, SwanLab. TensorBoard's files are "
        "always written.",
    )
    function: UserFunction | None = Field(
        None,
        description="Own class, in place of `type` (docs/trackers.md): "
        "`path/to/file.py:Class` or `package.module.Class`.",
    )
    project: _Name = Field(
        "sluice", description="Project; MLflow calls it an experiment. It is made if missing."
    )
    name: _Name | None = Field(
        None, description="Name of the run in the tracker. Default: that of the job."
    )
    args: FreeForm = Field(
        default_factory=dict,
        description="Further arguments: of wandb.init, swanlab.init or trackio.init, such as "
        "`entity`, `group` or `tags`; for MLflow the run's tags; for an own class `run.args`.",
    )
    sample_every_steps: NonNegativeInt = Field(
        10,
        description="Steps between tables of samples. Evaluations always have one. 0: no tables.",
    )
    secret_ref: SecretRef | None = Field(
        None,
        description="Secret whose keys become environment variables of the trainer, such as "
        "WANDB_API_KEY, MLFLOW_TRACKING_URI or SWANLAB_API_KEY.",
    )
    python: CommandWord | None = Field(
        None, description="Python interpreter that has the library. Default: that of the trainer."
    )

    rules = (exactly_one("type", "function"),)


class Telemetry(Model):
    """What watches the run besides metrics and the run directory."""

    trackers: Annotated[list[TrackerSpec], Field(max_length=8)] = Field(
        default_factory=list,
        description="Trackers. Default: Weights & Biases if WANDB_API_KEY is set or "
        "WANDB_MODE is offline, which then gets no samples; otherwise none.",
    )
