"""spec.buffer and spec.checkpoint, with the volume claims that the operator makes for them.

A job without a word about its checkpoints gets a claim for them. A lost trainer goes on from there,
the final model stays when the job is deleted, and engines that read weights from a directory find
it there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sluice.api.schema.base import ClassName, Model, PositiveFloat, PositiveInt, Quantity, Unique
from sluice.api.schema.kubernetes_fields import PodTemplate, VolumeSource
from sluice.api.schema.rules import Rule, at_most_one_of, field, only_with, written


class BufferStorage(Model):
    """The volume claim of the buffer."""

    size: Quantity = Field("20Gi", description="Size of the claim.")
    storage_class_name: ClassName | None = Field(
        None, description="Default: the cluster's default class."
    )


class CheckpointStorage(Model):
    """The volume claim for checkpoints, the final model, metrics and samples.
    The operator makes it.
    """

    size: Quantity = Field(
        "100Gi",
        description="Size of the claim. A checkpoint takes 14 bytes for each parameter of the "
        "model; `keep` of them "
        "and one more lie there at a time, beside the final model. Default: 100Gi.",
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
        description="Default: ReadWriteMany where pods of several nodes use it (trainer.nodes > 1; "
        "weightSync.transport: disk without shared GPUs), else ReadWriteOnce.",
    )
    when_deleted: Literal["Retain", "Delete"] = Field(
        "Retain",
        description="What becomes of the claim, and all that is on it, when the job is deleted.",
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
)

_MODES = "self.checkpoint.storage.accessModes"
_HAS_MODES = f"has(self.checkpoint.storage) && has({_MODES})"
_TRANSPORT = "self.weightSync.?transport.orValue(self.trainer.colocate ? 'disk' : '')"


def _one_node_only(checkpoint: Any) -> bool:
    """The claim is one that pods of several nodes cannot mount."""
    modes = checkpoint.storage.access_modes if checkpoint.storage else None
    return modes is not None and "ReadWriteMany" not in modes


# Rules of a job's spec.
CHECKPOINT_ACROSS_GROUPS = (
    Rule(
        written(
            f"self.trainer.nodes == 1 || !({_HAS_MODES}) || 'ReadWriteMany' in {_MODES}",
            lambda s: s.trainer.nodes == 1 or not _one_node_only(s.checkpoint),
        ),
        "trainer pods of several nodes write one checkpoint together: trainer.nodes > 1 needs "
        "ReadWriteMany, and a storage class that has it",
        "checkpoint.storage.accessModes",
    ),
    only_with(
        "checkpoint.ephemeral",
        field("trainer.nodes") == 1,
        "trainer pods of several nodes write one checkpoint together, which the directory of a "
        "single pod cannot hold: with trainer.nodes > 1 leave ephemeral out",
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
    """The service that hands out prompts and keeps samples until they are trained."""

    storage: BufferStorage = Field(default_factory=BufferStorage)
    memory: Quantity = Field(
        "2Gi", description="Memory request and limit of the buffer's container."
    )
    lease_seconds: PositiveFloat = Field(
        60.0, description="A lease without a heartbeat for this long goes to another worker."
    )
    template: PodTemplate = Field(
        default_factory=dict, description="Pod template, merged over ours (strategic merge)."
    )


class KernelCache(Model):
    """Compiled kernels that outlive the pods of engines and trainer."""

    volume: VolumeSource = Field(
        description="Kubernetes volume source that they share, with directories of their own; jobs "
        "may share it too. A claim that pods of several nodes use needs ReadWriteMany."
    )


class Checkpoint(Model):
    """The part of the training that is kept, and where."""

    volume: VolumeSource | None = Field(
        None,
        description="Kubernetes volume source for checkpoints, in place of the operator's claim.",
    )
    storage: CheckpointStorage | None = Field(
        None,
        description="The claim that the operator makes. Default, without volume and ephemeral: one "
        "of 100Gi.",
    )
    ephemeral: bool = Field(
        False,
        description="Keep checkpoints, the final model and metrics in the trainer's pod alone: "
        "they go with it, and a trainer that is lost after its first checkpoint fails the job.",
    )
    every_steps: PositiveInt = Field(
        20, description="Steps between checkpoints. The last step is always saved."
    )
    keep: PositiveInt = Field(2, description="How many checkpoints are kept.")
    async_: Annotated[bool, Field(alias="async")] = Field(
        False,
        alias="async",
        description="Write beside training. It counts, and the buffer forgets, only once it is on "
        "the disk.",
    )
    export_hf: Annotated[bool, Field(alias="exportHF")] = Field(
        True, alias="exportHF", description="Write the final model as a Hugging Face checkpoint."
    )

    rules = PLACES

    @property
    def claim(self) -> CheckpointStorage | None:
        """The claim that the operator makes; None: checkpoints lie elsewhere."""
        return (
            None
            if self.volume is not None or self.ephemeral
            else self.storage or CheckpointStorage()
        )
