"""spec.debug: look at one half of the loop alone, and keep what flows between the halves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice.api.schema.base import Model, PositiveInt, Unique
from sluice.api.schema.paths import RolloutsPath
from sluice.api.schema.rules import at_most_one_of

# Largest number of profiled steps: a trace of one has up to hundreds of megabytes.
MAX_PROFILED = 16


class Debug(Model):
    """Run one half of the loop alone, or record what passes between the halves."""

    dump_rollouts: bool = Field(
        False,
        description="Keep all samples of every trained step as rollouts/step_<n>.parquet in "
        "the run directory (docs/evaluation.md lists the columns).",
    )
    replay: RolloutsPath | None = Field(
        None,
        description="Directory of rollouts that an earlier run dumped. The job trains on "
        "them in their order, without engines. Needs rollout.replicas: 0. With data.volume: "
        "relative to the root of that volume.",
    )
    rollout_only: bool = Field(
        False,
        description="Generate, score and record samples without training. The weights stay "
        "those of model.path.",
    )
    profile: Annotated[list[PositiveInt], Field(max_length=MAX_PROFILED), Unique()] = Field(
        [],
        description="Steps for which each trainer rank writes a trace of torch's profiler "
        "and, on GPUs, a memory history to profiles/ of the run directory "
        "(docs/profiling.md).",
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
