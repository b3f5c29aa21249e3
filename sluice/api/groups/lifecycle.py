"""How a job's pods are run: restarts, queueing, networks, tokens, templates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import (
    LabelledName,
    Model,
    NonNegativeInt,
    ObjectName,
    PositiveInt,
    SecretEntry,
    Unique,
)
from sluice.api.schema.kubernetes_fields import NetworkPolicyPeer, PodTemplate
from sluice.api.schema.rules import exactly_one


class FailurePolicy(Model):
    """The consequences of pods' failures."""

    max_restarts: NonNegativeInt = Field(
        3, description="Restarts of the trainer gang before the job fails."
    )
    rollout_backoff_seconds: PositiveInt = Field(
        10,
        description="Pause before an engine that failed is started again. It doubles with each "
        "failure in a row, up to 30 times this.",
    )

    @property
    def longest_rollout_backoff(self) -> int:
        """The longest pause, in seconds."""
        return 30 * self.rollout_backoff_seconds


class Kueue(Model):
    """Admission by Kueue."""

    queue_name: LabelledName = Field(description="A LocalQueue.")
    priority_class: LabelledName | None = Field(None, description="A WorkloadPriorityClass.")


class Volcano(Model):
    """Gang scheduling by Volcano."""

    queue: ObjectName | None = Field(None, description="Default: Volcano's queue `default`.")
    priority_class_name: ObjectName | None = Field(
        None, description="PriorityClass of the PodGroup."
    )


class NativePodGroup(Model):
    """PodGroups of scheduling.k8s.io/v1beta1 (Kubernetes 1.37, feature gate GenericWorkload)."""


class PodGroupPolicy(Model):
    """Gang admission by a scheduler that the cluster has. Exactly one."""

    kueue: Kueue | None = None
    volcano: Volcano | None = None
    native: NativePodGroup | None = None

    rules = (exactly_one("kueue", "volcano", "native"),)


NodeLabel = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        max_length=317,
    ),
]


class Topology(Model):
    """Pods that are to lie in one domain of the cluster: one zone, block, rack, NVLink domain.
    Exactly one.
    """

    required: NodeLabel | None = Field(
        None,
        description="Label of nodes that names their domain. Where no domain has room the pods "
        "wait.",
    )
    preferred: NodeLabel | None = Field(None, description="The same as a wish.")

    rules = (exactly_one("required", "preferred"),)


class NetworkPolicy(Model):
    """The connections to the job's pods that are allowed."""

    enabled: bool = Field(
        True,
        description="Only pods of the same job, the operator and, on the metrics port, Prometheus "
        "may connect.",
    )
    metrics_from: Annotated[list[NetworkPolicyPeer], Field(max_length=16)] = Field(
        default_factory=list,
        description="NetworkPolicyPeers that may scrape. Default: all pods of the cluster.",
    )


class PodDisruptionBudget(Model):
    """The pods that a drain of nodes may take."""

    enabled: bool = Field(
        True, description="A drain of nodes never takes the last engine before another is ready."
    )


class SecretKey(Model):
    """One key of a Secret of the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: SecretEntry = Field(description="Key in it.")


class Secrets(Model):
    """Tokens by reference; their texts never stand in a manifest."""

    hugging_face: SecretKey | None = Field(
        None,
        description="HF_TOKEN for trainer, engine and rollout worker, which may then ask the hub.",
    )
    wandb: SecretKey | None = Field(None, description="WANDB_API_KEY for the trainer.")


class TlsSpec(Model):
    """Encryption between the job's pods."""

    enabled: bool = Field(
        False,
        description="Calls between the job's pods are encrypted; servers prove themselves by a "
        "certificate authority of the job's own. Cannot be changed once pods were started.",
    )


class PodTemplateOverride(Model):
    """A pod template that is merged into the pods of some roles, over everything else."""

    roles: Annotated[
        list[Literal["trainer", "rollout", "buffer", "rendezvous"]],
        Field(min_length=1, max_length=4),
        Unique(),
    ] = Field(description="Whose pods it is merged into.")
    template: PodTemplate = Field(description="Pod template (strategic merge).")
