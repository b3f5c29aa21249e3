"""spec.buffer, spec.downloads and spec.checkpoint, with the claims that the operator creates.

By default a job gets a claim for its checkpoints: a trainer that is lost resumes from it, the final
model stays when the job is deleted, and engines that read weights from a directory find it there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sluice.api.groups.telemetry import SecretRef
from sluice.api.schema.base import ClassName, Model, PositiveFloat, PositiveInt, Quantity, Unique
from sluice.api.schema.kubernetes_fields import PodTemplate, VolumeSource
from sluice.api.schema.rules import Rule, at_most_one_of, field, only_with, written

# A prefix in an object store.
BUCKET_URI = r"^(s3|gs|az)://[A-Za-z0-9$][A-Za-z0-9._-]+(/[^/\s]+)*/?$"


class BufferStorage(Model):
    """Volume claim of the buffer."""

    size: Quantity = Field("20Gi", description="Size of the claim.")
    storage_class_name: ClassName | None = Field(
        None, description="Default: the cluster's default class."
    )


class CheckpointStorage(Model):
    """Volume claim for checkpoints, the final model, metrics and samples.

    The operator creates it.
    """

    size: Quantity = Field(
        "100Gi",
        description="Size of the claim. A checkpoint takes 14 bytes per parameter of the "
        "model. The claim holds `keep` checkpoints, one more while it is written, and the "
        "final model. Default: 100Gi.",
    )
    storage_class_name: ClassName | None = Field(
        None, description="Default: the cluster's default class."
    )
    access_modes: (
        Annotated[
            list[Literal["ReadWriteOnce", "ReadWriteMany"]],
            Field(min_length=1, max_length=2),
            Unique(),
        ]
        | None
    ) = Field(
        None,
        description="Access modes. Default: ReadWriteMany if pods of several nodes use the "
        "claim (trainer.nodes > 1; weightSync.transport: disk without shared GPUs), else "
        "ReadWriteOnce.",
    )
    when_deleted: Literal["Retain", "Delete"] = Field(
        "Retain",
        description="Keep or delete the claim, with all data on it, when the job is deleted.",
    )


# Rules of spec.checkpoint.
PLACES = (
    at_most_one_of(
        "volume",
        "storage",
        "ephemeral",
        message="at most one of volume, storage and ephemeral may be set; with none of them the "
        "operator makes a claim",
        about="",
    ),
    only_with("secretRef", field("to").is_set),
)

_MODES = "self.checkpoint.storage.accessModes"
_HAS_MODES = f"has(self.checkpoint.storage) && has({_MODES})"
_TRANSPORT = "self.weightSync.?transport.orValue(self.trainer.colocate ? 'disk' : '')"


def _one_node_only(checkpoint: Any) -> bool:
    """True if pods of several nodes cannot mount the claim."""
    modes = checkpoint.storage.access_modes if checkpoint.storage else None
    return modes is not None and "ReadWriteMany" not in modes


# Rules of a job's spec.
CHECKPOINT_ACROSS_GROUPS = (
    Rule(
        written(
            "self.trainer.nodes == 1 || has(self.checkpoint.to) || "
            f"!({_HAS_MODES}) || 'ReadWriteMany' in {_MODES}",
            lambda s: (
                s.trainer.nodes == 1
                or s.checkpoint.to is not None
                or not _one_node_only(s.checkpoint)
            ),
        ),
        "trainer pods of several nodes write one checkpoint together: trainer.nodes > 1 needs "
        "ReadWriteMany, and a storage class that has it; or write checkpoints to an object store "
        "(checkpoint.to)",
        "checkpoint.storage.accessModes",
    ),
    only_with(
        "checkpoint.ephemeral",
        written(
            "self.trainer.nodes == 1 || has(self.checkpoint.to)",
            lambda s: s.trainer.nodes == 1 or s.checkpoint.to is not None,
        ),
        "trainer pods of several nodes write one checkpoint together, which the directory of a "
        "single pod cannot hold: with trainer.nodes > 1 leave ephemeral out, or write checkpoints "
        "to an object store (checkpoint.to)",
    ),
    only_with(
        "checkpoint.ephemeral",
        written(f"{_TRANSPORT} != 'disk'", lambda s: s.transport(one_machine=False) != "disk"),
        "engines read the weights that the trainer has written (transport: disk, the default of "
        "colocate in a cluster), and an ephemeral directory belongs to one pod: leave ephemeral "
        "out",
    ),
)


class BufferSpec(Model):
    """Service that hands out prompts and keeps samples until they are trained."""

    storage: BufferStorage = Field(default_factory=BufferStorage)
    memory: Quantity = Field(
        "2Gi", description="Memory request and limit of the buffer's container."
    )
    lease_seconds: PositiveFloat = Field(
        60.0, description="Seconds without a heartbeat after which a lease goes to another worker."
    )
    template: PodTemplate = Field(
        default_factory=dict,
        description="Pod template, merged over that of sluice (strategic merge).",
    )


class KernelCache(Model):
    """Volume for compiled kernels, which outlive the pods of engines and trainer."""

    volume: VolumeSource = Field(
        description="Kubernetes volume source. Each role has its own directory on it, and "
        "jobs may share it. A claim that pods of several nodes use needs ReadWriteMany."
    )


class Downloads(Model):
    """Files that URIs of the spec name, as pods of a cluster fetch them."""

    volume: VolumeSource | None = Field(
        None,
        description="Kubernetes volume source for what is fetched. A claim or a hostPath keeps it "
        "for other pods and other jobs; a claim that pods of several nodes use needs "
        "ReadWriteMany. Default: emptyDir, which each pod fills for itself.",
    )
    secret_ref: SecretRef | None = Field(
        None,
        description="Secret whose keys become variables of the init containers that fetch, such "
        "as AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and HF_TOKEN. No other container gets them. "
        "Default: what the pods have by themselves, such as workload identity.",
    )


class Checkpoint(Model):
    """Checkpoints: what is kept, and on which volume."""

    volume: VolumeSource | None = Field(
        None,
        description="Kubernetes volume source for checkpoints, in place of a claim of the "
        "operator.",
    )
    storage: CheckpointStorage | None = Field(
        None,
        description="Claim that the operator creates. Default, without volume and ephemeral: "
        "one of 100Gi.",
    )
    ephemeral: bool = Field(
        False,
        description="Keep checkpoints, the final model and metrics only in the trainer's "
        "pod. They are lost with it, and the job fails if the trainer is lost after its "
        "first checkpoint.",
    )
    to: Annotated[str, Field(max_length=1024, pattern=BUCKET_URI)] | None = Field(
        None,
        description="Prefix in an object store for checkpoints and the final model, such as "
        "s3://bucket/runs/gsm8k; also gs:// and az://. One job at a time may use it. The claim or "
        "volume then holds only metrics and samples, and is used by one pod of the trainer.",
    )
    secret_ref: SecretRef | None = Field(
        None,
        description="Secret whose keys become variables of the trainer, such as "
        "AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL, for `to`. Default: what the pod has by itself, "
        "such as workload identity.",
    )
    every_steps: PositiveInt = Field(
        20, description="Number of steps between checkpoints. The last step is always saved."
    )
    keep: PositiveInt = Field(2, description="Number of checkpoints that are kept.")
    async_: Annotated[bool, Field(alias="async")] = Field(
        False,
        alias="async",
        description="Write checkpoints while training goes on. A checkpoint counts, and the "
        "buffer forgets its samples, only once it is on disk.",
    )
    export_hf: Annotated[bool, Field(alias="exportHF")] = Field(
        True, alias="exportHF", description="Write the final model as a Hugging Face checkpoint."
    )

    rules = PLACES

    @property
    def claim(self) -> CheckpointStorage | None:
        """Claim that the operator creates, or None if checkpoints are on another volume."""
        return (
            None
            if self.volume is not None or self.ephemeral
            else self.storage or CheckpointStorage()
        )
