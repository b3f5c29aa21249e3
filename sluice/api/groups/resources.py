"""Resources that a container requests from its node."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice.api.schema.base import Model, Quantity
from sluice.api.schema.rules import Rule, written

GPU = "nvidia.com/gpu"
# Container -> the field that limits its memory.
_MEMORY_FIELDS = {
    "trainer": "spec.trainer.resources.limits.memory",
    "engine": "spec.rollout.resources.limits.memory",
    "worker": "spec.rollout.workerResources.limits.memory",
    "buffer": "spec.buffer.memory",
    "rows": "spec.buffer.memory",
}
# Container -> settings that make it use less memory.
_LESS_MEMORY = {
    "trainer": "lower spec.trainer.maxTokensPerGpu, or set spec.trainer.recompute: full",
    "engine": "lower spec.rollout.concurrency or spec.rollout.engineArgs.memFractionStatic",
    "worker": "lower spec.rollout.concurrency",
    "buffer": "lower spec.rollout.batchSize",
}


def memory_field(role: str, container: str) -> str:
    """Return the field that limits the memory of a container, or the template of its role."""
    in_template = (
        f"resources.limits.memory of {container or 'its container'} in the template of {role}"
    )
    return _MEMORY_FIELDS.get(container, in_template)


def less_memory(container: str) -> str:
    """Say which settings make a container use less memory."""
    return _LESS_MEMORY.get(container, "take a machine with more")


class Resources(Model):
    """Requests and limits of a container, as in a pod.

    Resources that are not named keep the default of the container.
    """

    requests: Annotated[dict[str, Quantity], Field(max_length=16)] = Field(
        default_factory=dict,
        description="Resources that a node must have free, such as `cpu: 8` and `memory: 64Gi`.",
    )
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] = Field(
        default_factory=dict,
        description="Most that the container may use. A limit without a request is also the "
        "request.",
    )

    rules = (
        Rule(
            written(
                f"!(has(self.requests) && '{GPU}' in self.requests) && "
                f"!(has(self.limits) && '{GPU}' in self.limits)",
                lambda r: GPU not in r.requests and GPU not in r.limits,
            ),
            f"{GPU} is what trainer.gpusPerNode and rollout.gpusPerReplica ask for: leave it out "
            "here",
            reason="FieldValueForbidden",
        ),
    )
