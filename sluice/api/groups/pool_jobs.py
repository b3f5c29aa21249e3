"""Rules of `rollout.pool`: a job that shares the engines of an RLEnginePool with other jobs."""

from __future__ import annotations

from sluice.api.schema.rules import field, requires

_POOLED = field("rollout.pool").is_set

# Rules of a job's spec.
POOL_ACROSS_GROUPS = (
    requires(
        _POOLED,
        field("trainer.lora").is_set,
        "jobs of a pool share its model and bring an adapter each: set trainer.lora, or leave pool "
        "out",
        "rollout.pool",
    ),
    requires(
        _POOLED,
        (field("weightSync.lora") == "adapter") & (field("weightSync.pauseMode") == "versions"),
        "engines of a pool hold an adapter for each job and weight version: set weightSync: {lora: "
        "adapter, pauseMode: versions}",
        "rollout.pool",
    ),
    requires(
        _POOLED,
        field("rollout.engine") == "sglang",
        "the engines of a pool are SGLang: leave rollout.engine out",
        "rollout.engine",
    ),
    requires(
        _POOLED,
        field("weightSync.fanOut") == "direct",
        "the trainer sends its adapter to each engine of a pool itself: leave weightSync.fanOut "
        "out",
        "weightSync.fanOut",
    ),
    requires(
        _POOLED,
        field("weightSync.transport") != "disk",
        "engines of a pool have no directory of the job's: leave weightSync.transport out",
        "weightSync.transport",
    ),
    requires(
        _POOLED,
        field("trainer.colocate").is_false,
        "engines of a pool do not share the trainer's GPUs: leave trainer.colocate out",
        "trainer.colocate",
    ),
    requires(
        _POOLED,
        field("rollout.nodesPerReplica") == 1,
        "each engine of a pool is one pod: leave rollout.nodesPerReplica out",
        "rollout.nodesPerReplica",
    ),
    requires(
        _POOLED,
        field("trainer.routingReplay") != "rollout",
        "engines of a pool do not report their routing: leave trainer.routingReplay: rollout out",
        "trainer.routingReplay",
    ),
    requires(
        _POOLED,
        ~field("rollout.engineArgs").is_set,
        "the engines are started by the pool: write engineArgs in the RLEnginePool",
        "rollout.engineArgs",
    ),
    requires(
        _POOLED,
        ~field("debug.replay").is_set & field("debug.rolloutOnly").is_false,
        "debug.replay and debug.rolloutOnly use no adapter, which engines of a pool serve alone: "
        "leave rollout.pool out",
        "rollout.pool",
    ),
)
