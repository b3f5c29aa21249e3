"""Rules of `trainer.colocate`: trainer and engines share the same GPUs and take turns."""

from __future__ import annotations

from typing import Any

from sluice.api.schema.rules import field, requires, written

_GPUS = "self.trainer.gpusPerNode"
_ENGINE = "self.rollout.gpusPerReplica"
_COLOCATED = field("trainer.colocate").is_true
_ON_GPU = field("trainer.gpusPerNode") > 0
_TRANSPORT = field("weightSync.transport")


def _fits(spec: Any) -> bool:
    gpus, engine = spec.trainer.gpus_per_node, spec.rollout.gpus_per_replica
    return bool(engine == 0 if gpus == 0 else engine > 0 and gpus % engine == 0)


def _filled(spec: Any) -> bool:
    trainer, rollout = spec.trainer, spec.rollout
    return bool(
        rollout.replicas * rollout.gpus_per_replica == trainer.nodes * trainer.gpus_per_node
    )


# Rules of a job's spec.
COLOCATION = (
    requires(
        _COLOCATED,
        field("rollout.mode") == "sync",
        "trainer and engines that share GPUs take turns: colocate needs rollout.mode: sync",
        "trainer.colocate",
    ),
    requires(
        _COLOCATED,
        _TRANSPORT != "nccl",
        "NCCL cannot connect two processes of one GPU; with colocate leave transport out (ipc), or "
        "use disk",
        "weightSync.transport",
    ),
    requires(
        _TRANSPORT == "ipc",
        _COLOCATED,
        "ipc hands over memory of GPUs that trainer and engines share: it needs trainer.colocate: "
        "true",
        "weightSync.transport",
    ),
    requires(
        _COLOCATED,
        field("rollout.nodesPerReplica") == 1,
        "with colocate an engine runs on one machine: nodesPerReplica must be 1",
        "rollout.nodesPerReplica",
    ),
    requires(
        _COLOCATED,
        written(
            f"({_GPUS} == 0 ? {_ENGINE} == 0 : ({_ENGINE} > 0 && {_GPUS} % {_ENGINE} == 0))", _fits
        ),
        "with colocate gpusPerReplica {} must divide trainer.gpusPerNode; on CPU both are 0",
        "rollout.gpusPerReplica",
        shows=lambda s: str(s.rollout.gpus_per_replica),
    ),
    requires(
        _COLOCATED & _ON_GPU,
        # An API server writes the default out, so 1 counts as left out.
        (field("rollout.replicas") == 1)
        | written(f"self.rollout.replicas * {_ENGINE} == self.trainer.nodes * {_GPUS}", _filled),
        "with colocate replicas x gpusPerReplica must be the trainer's nodes x gpusPerNode; leave "
        "replicas out",
        "rollout.replicas",
    ),
    requires(
        _COLOCATED & _ON_GPU,
        written(
            f"self.trainer.?processesPerNode.orValue({_GPUS}) == {_GPUS}",
            lambda s: s.trainer.processes_per_node in (None, s.trainer.gpus_per_node),
        ),
        "with colocate each GPU has one trainer process: leave processesPerNode out",
        "trainer.processesPerNode",
    ),
    requires(
        _COLOCATED,
        field("debug.rolloutOnly").is_false,
        "debug.rolloutOnly trains nothing that could take turns: set trainer.colocate: false",
        "trainer.colocate",
    ),
)
