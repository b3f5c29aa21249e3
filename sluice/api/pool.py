"""RLEnginePool: engines of one base model that the adapters of several RLJobs share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sluice.api.groups.engine_args import POOL_ENGINE_ARGS
from sluice.api.groups.lifecycle import Kueue, NetworkPolicy
from sluice.api.groups.lora import ALL_LINEAR, ModuleName
from sluice.api.groups.resources import Resources
from sluice.api.groups.rollout import EngineArgs
from sluice.api.groups.storage import Downloads
from sluice.api.job import ObjectMeta
from sluice.api.schema.base import API_VERSION, Model, NonNegativeInt, Unique
from sluice.api.schema.kubernetes_fields import NetworkPolicyPeer, PodTemplate, VolumeSource
from sluice.api.schema.paths import ModelPath
from sluice.api.schema.rules import Rule
from sluice.api.status import AnyCondition

KIND = "RLEnginePool"
PLURAL = "rlenginepools"
SHORT_NAME = "rlp"
# Fields of the spec that may never change, and why.
IMMUTABLE = {
    "model": "cannot be changed, because jobs train adapters of this model: make another pool",
    "engine": "cannot be changed: make another pool",
    "gpusPerReplica": "cannot be changed, because every engine would restart at once: make another "
    "pool and delete this one once its jobs have ended",
}


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


class PoolNetworkPolicy(NetworkPolicy):
    """Connections to the engines that are allowed."""

    enabled: bool = Field(
        True,
        description="Only the pool's own pods, pods of its jobs, the operator and Prometheus may "
        "connect.",
    )
    metrics_from: Annotated[list[NetworkPolicyPeer], Field(max_length=16)] = Field(
        default_factory=list,
        description="NetworkPolicyPeers that may connect to the engines' HTTP port, on which "
        "Prometheus reads /metrics. Default: all pods of the cluster.",
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
    downloads: Downloads | None = Field(
        None,
        description="Where engines keep a model that the spec names by URI, and the credentials "
        "for fetching it. `sluice pool up` has its own cache.",
    )
    kueue: Kueue | None = Field(
        None, description="Queue that admits the engines, apart from the trainers of the jobs."
    )
    network_policy: PoolNetworkPolicy = Field(default_factory=PoolNetworkPolicy)
    template: PodTemplate = Field(
        default_factory=dict,
        description="Pod template, merged over that of sluice (strategic merge).",
    )

    rules: ClassVar[tuple[Rule, ...]] = POOL_ENGINE_ARGS


class PoolCondition(AnyCondition):
    """Condition of an RLEnginePool."""

    type: Literal["Ready"] = Field(description="Name of the condition.")


class RLEnginePoolStatus(Model):
    """Observed state of the pool."""

    observed_generation: int | None = Field(
        None, description="Newest generation of the object that this status reflects."
    )
    conditions: Annotated[list[PoolCondition], Field(max_length=4), Unique("type")] = Field(
        default_factory=list,
        description="Ready: whether all engines answer and, if not, why.",
    )
    engines: str = Field("", description="Engines that answer, of all, such as 1/2.")
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

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"
