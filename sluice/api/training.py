"""spec.rollout, spec.trainer, spec.weightSync, spec.buffer, spec.checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from sluice.api.base import (
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Quantity,
    Rule,
)
from sluice.api.foreign import PodTemplate, VolumeSource
from sluice.api.lifecycle import Topology
from sluice.api.paths import GroupFilter, UserFunction
from sluice.api.resources import Resources
from sluice.api.storage import PLACES, BufferStorage, CheckpointStorage


class Sampling(Model):
    """How responses are sampled."""

    temperature: PositiveFloat = Field(1.0, description="Training logits are divided by it too.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Sample among the likeliest tokens that together have this probability."
    )
    top_k: int = Field(-1, description="-1: all tokens.", ge=-1)
    max_response_tokens: PositiveInt = Field(
        1024, description="Longest response; a longer one is cut off there."
    )
    stop: Annotated[list[str], Field(max_length=32)] = Field(
        default_factory=list, description="Stop strings."
    )

    @property
    def truncated(self) -> bool:
        """True where some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0


class Partial(Model):
    """The treatment of responses that an interruption cut off."""

    enabled: bool = Field(
        False,
        description="Continue responses that an interruption cut off, instead of dropping them.",
    )
    mask_off_policy: bool = Field(
        False, description="Train only on the tokens of the newest weights."
    )


class HooksSpec(Model):
    """Own functions (prompt, sample) that may change each finished sample, sync or async."""

    before_reward: UserFunction | None = Field(None, description="Before the sample is judged.")
    after_reward: UserFunction | None = Field(
        None, description="After it was judged: its reward is set."
    )


EngineArg = Annotated[
    str | int | float | bool | list[str],
    WithJsonSchema({"x-kubernetes-preserve-unknown-fields": True}),
]


class Rollout(Model):
    """The engines that generate."""

    replicas: NonNegativeInt | None = Field(
        None,
        description="Engines. No default: an autoscaler owns it where it is left out; minReplicas "
        "at the start.",
    )
    min_replicas: PositiveInt = Field(
        1,
        description="Engines that a queue admits together with the trainer (podGroupPolicy), and "
        "that the job starts with where replicas is left out. An autoscaler goes no lower.",
    )
    engine: Literal["sglang", "vllm"] = Field(
        "sglang", description="What generates. vllm: vLLM 0.32."
    )
    gpus_per_replica: NonNegativeInt = Field(1, description="GPUs of one engine; 0: CPU.")
    nodes_per_replica: PositiveInt = Field(1, description="Pods of one engine.")
    engine_args: Annotated[
        dict[str, EngineArg],
        WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
    ] = Field(
        default_factory=dict,
        description="Further arguments of the engine's server, without the leading dashes.",
    )
    batch_size: PositiveInt = Field(32, description="Prompt groups of one training step.")
    samples_per_prompt: PositiveInt = Field(
        8, description="Responses of one prompt: the size of a group."
    )
    sampling: Sampling = Field(default_factory=Sampling)
    concurrency: PositiveInt = Field(
        256, description="Requests that one worker keeps open at its engine."
    )
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="sync: every sample comes from the newest weights. async: maxStaleness steps "
        "may lie between.",
    )
    max_staleness: NonNegativeInt = Field(
        0, description="Steps that a sample's weights may be behind. 0 with mode sync."
    )
    partial: Partial = Field(default_factory=Partial)
    dynamic_filter: GroupFilter | None = Field(
        None,
        description="`nonzero_std` drops groups whose rewards are all equal; or an own function by "
        "dotted path.",
    )
    over_sampling: Annotated[float, Field(ge=1, le=16)] = Field(
        1.0, description="Start this many times batchSize groups and take the first that finish."
    )
    function: UserFunction | None = Field(
        None,
        description="Own generate function `async def play(episode)`, for several turns and tools; "
        "or, decorated with `whole_group`, `async def play(episodes)` for all samples of a prompt.",
    )
    function_seconds: PositiveFloat = Field(
        120.0,
        description="`function` may take this long between two turns of the model (its tools); "
        "then its sample fails.",
    )
    hooks: HooksSpec = Field(default_factory=HooksSpec)
    resources: Resources = Field(
        default_factory=Resources,
        description="Of the engine's container. Default: requests of 2 CPUs and 8Gi for each GPU; "
        "without GPUs 250m and 1Gi.",
    )
    worker_resources: Resources = Field(
        default_factory=Resources,
        description="Of the container beside the engine, which judges samples. Default: requests "
        "of 500m and 1Gi; without GPUs 100m and 256Mi.",
    )
    topology: Topology | None = Field(
        None, description="Domain of the cluster for the pods of one engine."
    )
    template: PodTemplate = Field(
        default_factory=dict, description="Pod template, merged over ours (strategic merge)."
    )

    rules = (
        Rule(
            "self.maxStaleness == 0 || self.mode == 'async'",
            lambda r: r.max_staleness == 0 or r.mode == "async",
            "maxStaleness > 0 needs mode: async",
            "maxStaleness",
        ),
        Rule(
            "self.mode == 'sync' || self.maxStaleness >= 1",
            lambda r: r.mode == "sync" or r.max_staleness >= 1,
            "mode: async needs maxStaleness of at least 1 (1 is one step off)",
            "maxStaleness",
        ),
        Rule(
            "!has(self.replicas) || self.replicas == 0 || self.minReplicas <= self.replicas",
            lambda r: not r.replicas or r.min_replicas <= r.replicas,
            "replicas must be at least minReplicas {} or 0",
            "replicas",
            lambda r: str(r.min_replicas),
        ),
        Rule(
            "self.engine != 'vllm' || self.nodesPerReplica == 1",
            lambda r: r.engine != "vllm" or r.nodes_per_replica == 1,
            "a vLLM engine is one pod here: nodesPerReplica must be 1, or engine sglang",
            "nodesPerReplica",
        ),
        Rule(
            "self.engine != 'vllm' || self.sampling.temperature == 1.0 || "
            "(self.sampling.topP == 1.0 && self.sampling.topK <= 0)",
            lambda r: r.engine != "vllm" or r.sampling.temperature == 1 or not r.sampling.truncated,
            "vLLM tells log-probs of all tokens at temperature 1, or at another one without topP "
            "and topK: set temperature to 1, or leave them out, or engine sglang",
            "sampling.temperature",
        ),
    )


class Parallelism(Model):
    """How model and sequences are spread over trainer processes.
    What is left of them is data parallel.
    """

    tensor: PositiveInt = Field(
        1,
        description="Ranks that share every matrix, and the tokens between them (sequence "
        "parallel).",
    )
    pipeline: PositiveInt = Field(1, description="Ranks that share the layers, equally many each.")
    context: PositiveInt = Field(
        1,
        description="Ranks that share the tokens of a micro-batch, which may have this many times "
        "maxTokensPerGpu.",
    )
    expert: PositiveInt = Field(
        1,
        description="Ranks that share the experts of a mixture, across tensor, context and data "
        "parallel ranks.",
    )
    virtual_pipeline: Annotated[int, Field(ge=2, le=1024)] | None = Field(
        None, description="Runs of layers of each pipeline rank: smaller bubbles, more messages."
    )

    rules = (
        Rule(
            "!has(self.virtualPipeline) || self.pipeline > 1",
            lambda p: p.virtual_pipeline is None or p.pipeline > 1,
            "virtualPipeline needs pipeline of at least 2",
            "virtualPipeline",
        ),
    )


class Optimizer(Model):
    """AdamW, its state spread over the ranks."""

    lr: NonNegativeFloat = Field(1e-6, description="Learning rate, after the warm-up.")
    min_lr: NonNegativeFloat = Field(0.0, description="Where the schedule ends.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate goes from lr to minLr."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Optimizer steps of linear warm-up from 0.")
    decay_steps: PositiveInt | None = Field(
        None, description="Length of the schedule. Default: all steps."
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW's decoupled weight decay.")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="Adam's decay of the gradients' mean."
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.95, description="Adam's decay of the gradients' squares."
    )
    eps: PositiveFloat = Field(1e-8, description="Adam's addition to the denominator.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Largest gradient norm; 0: no limit.")


def _whole(field: str) -> Rule:
    """FSDP2 spreads parameters and sequences over all ranks: there is no other way to share."""
    return Rule(
        f"self.backend != 'fsdp' || self.parallelism.{field} == 1",
        lambda t: t.backend != "fsdp" or getattr(t.parallelism, field) == 1,
        f"backend: fsdp has no parallelism.{field}: it spreads parameters and sequences over all "
        "trainer processes; leave it out, or choose backend: megatron",
        f"parallelism.{field}",
    )


class Trainer(Model):
    """The trainer."""

    nodes: PositiveInt = Field(1, description="Trainer pods.")
    gpus_per_node: NonNegativeInt = Field(
        1, description="GPUs, and trainer processes, of one pod; 0: CPU."
    )
    colocate: bool = Field(
        False,
        description="Trainer and engines share the same GPUs and take turns. Needs rollout.mode: "
        "sync.",
    )
    offload: Literal["none", "optimizer", "all"] | None = Field(
        None,
        description="What the trainer keeps in host memory while the engines generate, with "
        "colocate. Default: all on GPU, none on CPU.",
    )
    cpu_offload: Literal["none", "all"] = Field(
        "none",
        description="What the trainer keeps in host memory also while it trains: all: weights, "
        "gradients and optimizer, whose step the CPU takes. For models that do not fit "
        "otherwise; needs backend: fsdp.",
    )
    device_class: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        "gpu.nvidia.com",
        description="DeviceClass of the GPUs in the ResourceClaims that colocate makes in a "
        "cluster.",
    )
    processes_per_node: PositiveInt | None = Field(
        None, description="Trainer processes of one pod. Default: gpusPerNode, or 1 on CPU."
    )
    backend: Literal["megatron", "fsdp"] = Field(
        "megatron",
        description="What trains. megatron: fastest, for the families that docs/models.md lists. "
        "fsdp: FSDP2, for any causal language model of transformers.",
    )
    parallelism: Parallelism = Field(default_factory=Parallelism)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    steps: PositiveInt | None = Field(
        None, description="Training steps (batches). Exactly one of steps and epochs."
    )
    epochs: PositiveInt | None = Field(
        None, description="Passes over the prompts. Exactly one of steps and epochs."
    )
    steps_per_batch: PositiveInt = Field(
        1, description="Optimizer steps that a batch is split into."
    )
    max_tokens_per_gpu: PositiveInt = Field(
        8192, description="Tokens of one micro-batch; a longer sequence goes alone."
    )
    recompute: Literal["none", "full"] = Field(
        "none", description="Recompute activations in the backward pass."
    )
    precision: Literal["bf16", "fp32"] | None = Field(
        None, description="Default: bf16 on GPU, fp32 on CPU."
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Of a trainer pod's container. Default: requests of 2 CPUs and 8Gi for each "
        "GPU; without GPUs 250m and 1Gi for each process.",
    )
    topology: Topology | None = Field(
        None, description="Domain of the cluster for the trainer's pods."
    )
    template: PodTemplate = Field(
        default_factory=dict, description="Pod template, merged over ours (strategic merge)."
    )

    rules = (
        Rule(
            "has(self.steps) != has(self.epochs)",
            lambda t: (t.steps is None) != (t.epochs is None),
            "exactly one of steps and epochs must be set",
            "steps",
        ),
        Rule(
            "self.?offload.orValue('none') == 'none' || self.colocate",
            lambda t: t.offload in (None, "none") or t.colocate,
            "only a trainer that shares its GPUs offloads: it needs colocate: true",
            "offload",
        ),
        Rule(
            "self.cpuOffload == 'none' || self.backend == 'fsdp'",
            lambda t: t.cpu_offload == "none" or t.backend == "fsdp",
            "only backend: fsdp trains from host memory",
            "cpuOffload",
        ),
        *map(_whole, ("tensor", "pipeline", "context", "expert")),
    )

    @property
    def offloaded(self) -> Literal["none", "optimizer", "all"]:
        """The parts of the trainer that lie in host memory while the engines generate."""
        return self.offload or ("all" if self.colocate and self.gpus_per_node else "none")

    @property
    def processes(self) -> int:
        """Trainer processes of one pod."""
        return self.processes_per_node or max(self.gpus_per_node, 1)

    @property
    def devices(self) -> int:
        """GPUs of all nodes; on CPUs 1."""
        return max(self.nodes * self.gpus_per_node, 1)

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    @property
    def model_parallel_size(self) -> int:
        return self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.context

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size


LONGEST_PAUSE_SECONDS = 600.0


class WeightSync(Model):
    """How new weights reach the engines."""

    transport: Literal["nccl", "gloo", "disk", "ipc"] | None = Field(
        None,
        description="Default: nccl on GPU, gloo on CPU. With trainer.colocate: ipc (memory that "
        "both open) on one machine, disk in a cluster.",
    )
    bucket_mi_b: Annotated[int, Field(ge=1, le=65536, alias="bucketMiB")] = Field(
        2048,
        alias="bucketMiB",
        description="Weights are sent in flat buckets of this size. While it sends, the trainer "
        "needs three of them.",
    )
    pause_mode: Literal["in_place", "retract", "abort"] = Field(
        "retract",
        description="What happens to running responses: go on with old cache, recompute the cache, "
        "or end.",
    )
    timeout_seconds: PositiveFloat = Field(
        300.0, description="Deadline of each phase of an update."
    )
    verify: bool = Field(
        True, description="Check after each update that the engine serves the new version."
    )
    engine_plugin: bool = Field(
        True,
        description="Start SGLang with sluice's plugin (vLLM always has its own): it receives a "
        "bucket into one buffer, loads all experts of a mixture's layer at once, survives a "
        "trainer that dies in the middle of an update, keeps requests from what older weights have "
        "left in its prefix cache, tells which weights sampled each token, and ends when it is "
        "told to, not seconds later. false: for an engine image whose SGLang has no plugins, or "
        "other ones; it then has to tell the weights of each token itself, as SGLang does from "
        "0.5.21 on. A directory (disk) always holds single experts.",
    )

    @property
    def pause_seconds(self) -> float:
        """How long an engine may stay paused:
        until a trainer that died in an update has a successor.

        The operator's probes and the worker beside the engine judge by it.
        """
        return max(LONGEST_PAUSE_SECONDS, 2 * self.timeout_seconds)


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
