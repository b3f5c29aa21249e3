"""Rules of `trainer.colocate`: trainer and engines share the same GPUs and take turns."""

from __future__ import annotations

from typing import Any

from sluice.api.schema.base import Rule

_ON = "self.trainer.colocate"
_GPUS = "self.trainer.gpusPerNode"
_ENGINE = "self.rollout.gpusPerReplica"
_TRANSPORT = "self.weightSync.?transport.orValue('')"


def _fits(spec: Any) -> bool:
    gpus, engine = spec.trainer.gpus_per_node, spec.rollout.gpus_per_replica
    return bool(engine == 0 if gpus == 0 else engine > 0 and gpus % engine == 0)


def _filled(spec: Any) -> bool:
    trainer, rollout = spec.trainer, spec.rollout
    taken = rollout.replicas * rollout.gpus_per_replica
    full = trainer.nodes * trainer.gpus_per_node
    return bool(trainer.gpus_per_node == 0 or rollout.replicas == 1 or taken == full)


COLOCATION = (
    Rule(
        f"!{_ON} || self.rollout.mode == 'sync'",
        lambda s: not s.trainer.colocate or s.rollout.mode == "sync",
        "trainer and engines that share GPUs take turns: colocate needs rollout.mode: sync",
        "trainer.colocate",
    ),
    Rule(
        f"!{_ON} || {_TRANSPORT} != 'nccl'",
        lambda s: not s.trainer.colocate or s.weight_sync.transport != "nccl",
        "NCCL connects no two processes of one GPU; with colocate leave transport out (ipc), or "
        "use disk",
        "weightSync.transport",
    ),
    Rule(
        f"{_TRANSPORT} != 'ipc' || {_ON}",
        lambda s: s.weight_sync.transport != "ipc" or s.trainer.colocate,
        "ipc hands over memory of GPUs that trainer and engines share: it needs trainer.colocate: "
        "true",
        "weightSync.transport",
    ),
    Rule(
        f"!{_ON} || self.rollout.nodesPerReplica == 1",
        lambda s: not s.trainer.colocate or s.rollout.nodes_per_replica == 1,
        "with colocate an engine lives on one machine: nodesPerReplica must be 1",
        "rollout.nodesPerReplica",
    ),
    Rule(
        f"!{_ON} || ({_GPUS} == 0 ? {_ENGINE} == 0 : ({_ENGINE} > 0 && {_GPUS} % {_ENGINE} == 0))",
        lambda s: not s.trainer.colocate or _fits(s),
        "with colocate gpusPerReplica {} must divide trainer.gpusPerNode; on CPU both are 0",
        "rollout.gpusPerReplica",
        lambda s: str(s.rollout.gpus_per_replica),
    ),
    Rule(
        # An API server writes the default out, so 1 counts as left out.
        f"!{_ON} || {_GPUS} == 0 || self.rollout.replicas == 1 || "
        f"self.rollout.replicas * {_ENGINE} == self.trainer.nodes * {_GPUS}",
        lambda s: not s.trainer.colocate or _filled(s),
        "with colocate replicas x gpusPerReplica must be the trainer's nodes x gpusPerNode; leave "
        "replicas out",
        "rollout.replicas",
    ),
    Rule(
        f"!{_ON} || {_GPUS} == 0 || self.trainer.?processesPerNode.orValue({_GPUS}) == {_GPUS}",
        lambda s: (
            not s.trainer.colocate
            or s.trainer.gpus_per_node == 0
            or s.trainer.processes_per_node in (None, s.trainer.gpus_per_node)
        ),
        "with colocate each GPU has one trainer process: leave processesPerNode out",
        "trainer.processesPerNode",
    ),
    Rule(
        f"!{_ON} || !self.debug.rolloutOnly",
        lambda s: not s.trainer.colocate or not s.debug.rollout_only,
        "debug.rolloutOnly trains nothing that could take turns: set trainer.colocate: false",
        "trainer.colocate",
    ),
)
"""Rules of the job's spec."""
