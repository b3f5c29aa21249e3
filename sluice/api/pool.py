"""RLEnginePool: engines of one base model that the adapters of several RLJobs share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.groups.lifecycle import Kueue, NetworkPolicy
from sluice.api.groups.lora import ALL_LINEAR, ModuleName
from sluice.api.groups.resources import Resources
from sluice.api.groups.rollout import EngineArgs
from sluice.api.job import ObjectMeta
from sluice.api.schema.base import API_VERSION, Model, NonNegativeInt
from sluice.api.schema.kubernetes_fields import PodTemplate, VolumeSource
from sluice.api.schema.paths import ModelPath

KIND = "RLEnginePool"
PLURAL = "rlenginepools"
SHORT_NAME = "rlp"


class PoolModel(Model):
    """Base model of a pool, which no job changes."""

    path: ModelPath = Field(
        description="Directory of a Hugging Face checkpoint: config.json, tokenizer and "
        "safetensors. Jobs of the pool name the same checkpoint in spec.model.path."
    )
    volume: VolumeSource | None = Field(
        None,
        description="Kubernetes volume source with the model. `path` is then relative to its root.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the checkpoint."
    )
    fp32_lm_head: bool = Field(
        False, description="Compute logits in float32. Jobs set spec.model.fp32LmHead likewise."
    )


class RLEnginePoolSpec(Model):
    """Desired state of the pool."""

    model: PoolModel
    engine: Literal["sglang"] = Field("sglang", description="Inference engine.")
    replicas: NonNegativeInt = Field(
        1,
        description="Number of engines. Each job of the pool uses all of them. Leave it out of a "
        "manifest if an autoscaler changes it.",
    )
    gpus_per_replica: NonNegativeInt = Field(1, description="Number of GPUs of one engine. 0: CPU.")
    max_adapters: Annotated[int, Field(ge=1, le=512)] = Field(
        16,
        description="Number of adapters that an engine computes with at the same time. A job has "
        "one for each weight version that running requests use, at most rollout.maxStaleness + 1 "
        "for long. Requests of further adapters wait until others have ended.",
    )
    max_rank: Annotated[int, Field(ge=1, le=1024)] = Field(
        32, description="Largest trainer.lora.rank of a job. Memory grows with it."
    )
    target_modules: Annotated[list[ModuleName], Field(min_length=1, max_length=64)] = Field(
        [ALL_LINEAR],
        description="Names of the linear layers that adapters may have, such as q_proj.",
    )
    engine_args: EngineArgs = Field(
        default_factory=dict,
        description="Arguments of the engine's server, without the leading dashes.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of the engine's container. Default: as those of an RLJob's engine.",
    )
    kueue: Kueue | None = Field(
        None, description="Queue that admits the engines, apart from the trainers of the jobs."
    )
    network_policy: NetworkPolicy = Field(default_factory=NetworkPolicy)
    template: PodTemplate = Field(
        default_factory=dict,
        description="Pod template, merged over that of sluice (strategic merge).",
    )


class RLEnginePoolStatus(Model):
    """Observed state of the pool."""

    observed_generation: int | None = None
    replicas: NonNegativeInt = Field(0, description="Number of engines that exist.")
    ready_replicas: NonNegativeInt = Field(0, description="Number of engines that answer.")
    selector: str = Field("", description="Label selector of the engines' pods, for autoscalers.")
    jobs: NonNegativeInt = Field(0, description="Number of unfinished jobs that use the pool.")
    tokens_per_second: str = Field(
        "", description="Tokens that the engines generate per second, by the last two looks."
    )


class RLEnginePool(Model):
    """Engines of one base model that several RLJobs share, each with its own adapter."""

    api_version: Literal["sluice.dev/v1alpha1"] = API_VERSION
    kind: Literal["RLEnginePool"] = "RLEnginePool"
    metadata: ObjectMeta
    spec: RLEnginePoolSpec
    status: RLEnginePoolStatus | None = None
