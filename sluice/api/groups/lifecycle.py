"""Operation of a job's pods: restarts, queueing, networks, tokens, templates."""

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
    """Consequences of failures of pods."""

    max_restarts: NonNegativeInt = Field(
        3, description="Number of restarts of the trainer gang before the job fails."
    )
    rollout_backoff_seconds: PositiveInt = Field(
        10,
        description="Pause in seconds before an engine that failed is started again. It "
        "doubles with each failure in a row, up to 30 times this.",
    )

    @property
    def longest_rollout_backoff(self) -> int:
        """The longest pause, in seconds."""
        return 30 * self.rollout_backoff_seconds


class Kueue(Model):
    """Admission by Kueue."""

    queue_name: LabelledName = Field(description="Name of a LocalQueue.")
    priority_class: LabelledName | None = Field(
        None, description="Name of a WorkloadPriorityClass."
    )


class Volcano(Model):
    """Gang scheduling by Volcano."""

    queue: ObjectName | None = Field(
        None, description="Queue of Volcano. Default: Volcano's queue `default`."
    )
    priority_class_name: ObjectName | None = Field(
        None, description="PriorityClass of the PodGroup."
    )


class NativePodGroup(Model):
    """PodGroups of scheduling.k8s.io/v1beta1 (Kubernetes 1.37, feature gate GenericWorkload)."""


class PodGroupPolicy(Model):
    """Gang admission by a scheduler of the cluster. Exactly one."""

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
    """Placement of pods in one domain of the cluster. Exactly one.

    A domain is a zone, block, rack or NVLink domain.
    """

    required: NodeLabel | None = Field(
        None,
        description="Label of nodes that names their domain. The pods wait until a domain "
        "has space.",
    )
    preferred: NodeLabel | None = Field(None, description="The same label as a preference.")

    rules = (exactly_one("required", "preferred"),)


class NetworkPolicy(Model):
    """Connections to the job's pods that are allowed."""

    enabled: bool = Field(
        True,
        description="Only pods of the same job, the operator and, on the metrics port, Prometheus "
        "may connect.",
    )
    metrics_from: Annotated[list[NetworkPolicyPeer], Field(max_length=16)] = Field(
        default_factory=list,
        description="NetworkPolicyPeers that may scrape the metrics port. Default: all pods "
        "of the cluster.",
    )


class PodDisruptionBudget(Model):
    """Protection of pods against drains of nodes."""

    enabled: bool = Field(
        True, description="A drain of nodes does not evict the last engine before another is ready."
    )


class SecretKey(Model):
    """Key of a Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: SecretEntry = Field(description="Key in the Secret.")


class Secrets(Model):
    """Tokens by reference. A manifest does not contain them."""

    hugging_face: SecretKey | None = Field(
        None,
        description="HF_TOKEN for trainer, engine and rollout worker, which may then ask the "
        "Hugging Face hub.",
    )
    wandb: SecretKey | None = Field(None, description="WANDB_API_KEY for the trainer.")


class TlsSpec(Model):
    """Encryption between the job's pods."""

    enabled: bool = Field(
        False,
        description="Encrypt calls between the job's pods. Servers prove their identity by a "
        "certificate authority that is made for the job. Cannot be changed after pods were "
        "started.",
    )


class PodTemplateOverride(Model):
    """Pod template that is merged into the pods of some roles, over everything else."""

    roles: Annotated[
        list[Literal["trainer", "rollout", "buffer", "rendezvous"]],
        Field(min_length=1, max_length=4),
        Unique(),
    ] = Field(description="Roles whose pods it is merged into.")
    template: PodTemplate = Field(description="Pod template (strategic merge).")
