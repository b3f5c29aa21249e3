"""spec.debug: look at one half of the loop alone, and keep what flows between the halves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice.api.schema.base import Model, PositiveInt, Unique
from sluice.api.schema.paths import RolloutsPath
from sluice.api.schema.rules import at_most_one_of

MAX_PROFILED = 16
"""Steps of a run: a trace of one has up to hundreds of megabytes."""


class Debug(Model):
    """One half of the loop alone, and what flows between the halves."""

    dump_rollouts: bool = Field(
        False,
        description="Keep all samples of every trained step as rollouts/step_<n>.parquet in the "
        "run directory (docs/evaluation.md has the columns).",
    )
    replay: RolloutsPath | None = Field(
        None,
        description="Train on the rollouts of an earlier run, in their order, without engines: the "
        "directory of its dumped files. With data.volume: relative to that volume's root. Needs "
        "rollout.replicas: 0.",
    )
    rollout_only: bool = Field(
        False,
        description="Generate, score and record; train nothing: the weights stay those of "
        "model.path.",
    )
    profile: Annotated[list[PositiveInt], Field(max_length=MAX_PROFILED), Unique()] = Field(
        [],
        description="Steps of which each trainer rank keeps a trace of torch's profiler and, on "
        "GPUs, a history of memory, in profiles/ of the run directory (docs/profiling.md).",
    )

    rules = (
        at_most_one_of(
            "replay",
            "rolloutOnly",
            message="replay and rolloutOnly exclude each other: one has no engines, the other no "
            "training",
            about="replay",
        ),
        at_most_one_of(
            "profile",
            "rolloutOnly",
            message="profile records steps of the trainer, and rolloutOnly trains nothing: leave "
            "one of them out",
            about="profile",
        ),
    )
