"""RLJob: the whole object, and rules over several groups of its spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from sluice.api.groups.algorithm import ACROSS_GROUPS, Algorithm
from sluice.api.groups.colocation import COLOCATION
from sluice.api.groups.data import Data, Evaluation, ModelSource, PromptSource, Reward, RowSource
from sluice.api.groups.debug import Debug
from sluice.api.groups.distillation import DISTILLATION_ACROSS_GROUPS
from sluice.api.groups.engine_args import ENGINE_ARGS
from sluice.api.groups.environment import REWARDED
from sluice.api.groups.image_jobs import IMAGES_ACROSS_GROUPS
from sluice.api.groups.image_training import IMAGE_TRAINING
from sluice.api.groups.lifecycle import (
    FailurePolicy,
    NetworkPolicy,
    PodDisruptionBudget,
    PodGroupPolicy,
    PodTemplateOverride,
    Secrets,
    TlsSpec,
    Topology,
)
from sluice.api.groups.losses import OFFLINE
from sluice.api.groups.offline import IS_OFFLINE, OFFLINE_ACROSS_GROUPS
from sluice.api.groups.pool_jobs import POOL_ACROSS_GROUPS
from sluice.api.groups.quantized_engines import QUANTIZED_ENGINES
from sluice.api.groups.rollout import Rollout
from sluice.api.groups.speculative import SPECULATION
from sluice.api.groups.storage import (
    CHECKPOINT_ACROSS_GROUPS,
    BufferSpec,
    Checkpoint,
    Downloads,
    KernelCache,
)
from sluice.api.groups.telemetry import Telemetry
from sluice.api.groups.trainer import Trainer
from sluice.api.groups.weight_sync import STORED_WEIGHTS, WeightSync
from sluice.api.schema.base import (
    API_VERSION,
    ControllerName,
    Model,
    NonNegativeInt,
    PositiveInt,
    ShortName,
)
from sluice.api.schema.capacity_rules import capacity_rules
from sluice.api.schema.rules import Rule, field, listed, requires, written
from sluice.api.status import RLJobStatus

KIND = "RLJob"
PLURAL = "rljobs"
SHORT_NAME = "rlj"
MANAGER = "sluice.dev/rljob-controller"


_GPUS = "self.trainer.gpusPerNode"
_PROCESSES = (
    f"self.trainer.nodes * self.trainer.?processesPerNode.orValue({_GPUS} > 0 ? {_GPUS} : 1)"
)
_MODEL_PARALLEL = " * ".join(
    f"self.trainer.parallelism.{name}" for name in ("tensor", "pipeline", "context")
)
_SAMPLES = (
    f"(self.algorithm.loss.?type.orValue('') in {listed(OFFLINE)} ? 1 : "
    "self.rollout.samplesPerPrompt)"
)
_SEQUENCES = f"self.rollout.batchSize * {_SAMPLES}"


_SGLANG = field("rollout.engine") == "sglang"
_VLLM = field("rollout.engine") == "vllm"
_ADAPTER_SYNC = field("weightSync.lora") == "adapter"


class RLJobSpec(Model):
    """Desired state of the job."""

    model: ModelSource
    data: Data
    rollout: Rollout = Field(default_factory=Rollout)
    reward: Reward | None = Field(
        None,
        description="Needed, unless the job distils (algorithm.distillation) and learns from "
        "its teacher alone, learns from given answers (algorithm.loss.type: sft, dpo, ...), or "
        "has an environment that gives rewards.",
    )
    algorithm: Algorithm = Field(default_factory=Algorithm)
    trainer: Trainer
    weight_sync: WeightSync = Field(default_factory=WeightSync)
    buffer: BufferSpec = Field(default_factory=BufferSpec)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    kernel_cache: KernelCache | None = Field(
        None,
        description="Volume on which engines and trainer keep the kernels that they compile "
        "at their start. Default: every pod compiles its own.",
    )
    downloads: Downloads | None = Field(
        None,
        description="Where pods keep the models and data that the spec names by URI, and the "
        "credentials for fetching them. `sluice run` has its own cache.",
    )
    evaluation: Evaluation | None = None
    telemetry: Telemetry = Field(default_factory=Telemetry)
    debug: Debug = Field(default_factory=Debug)
    suspend: bool = Field(
        False, description="Stop all pods and keep everything that they have stored."
    )
    managed_by: ControllerName | None = Field(
        None,
        description="Controller that is responsible, such as `acme.io/controller`. Default: "
        "the operator of sluice. Cannot be changed.",
    )
    active_deadline_seconds: PositiveInt | None = Field(
        None, description="The job fails after it has run for this many seconds. Default: no limit."
    )
    startup_deadline_seconds: NonNegativeInt = Field(
        14400,
        description="The job fails if its first step is not trained this many seconds after "
        "its start. Waiting in a queue does not count; waiting for space without a queue "
        "does. 0: no limit.",
    )
    progress_deadline_seconds: PositiveInt | None = Field(
        None,
        description="Seconds without a step that count as a failure of the trainer, which is "
        "then restarted. Default: no limit.",
    )
    queue_timeout_seconds: PositiveInt | None = Field(
        None,
        description="The job fails after a queue has held it for this many seconds, before "
        "its start or after it was preempted. Default: it waits.",
    )
    ttl_seconds_after_finished: NonNegativeInt | None = Field(
        None, description="Seconds after which the finished job is deleted. Default: never."
    )
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    pod_group_policy: PodGroupPolicy | None = None
    topology: Topology | None = Field(
        None,
        description="Domain of the cluster for all pods of trainer and engines. Default: one "
        "zone, as a preference. In a queue of Kueue its topology-aware scheduling gets the "
        "level, otherwise the pods' affinity.",
    )
    network_policy: NetworkPolicy = Field(default_factory=NetworkPolicy)
    pod_disruption_budget: PodDisruptionBudget = Field(default_factory=PodDisruptionBudget)
    secrets: Secrets = Field(default_factory=Secrets)
    tls: TlsSpec = Field(default_factory=TlsSpec)
    pod_template_overrides: Annotated[list[PodTemplateOverride], Field(max_length=16)] = Field(
        default_factory=list,
        description="Pod templates that are merged over everything else, in their order.",
    )

    rules = (
        Rule(
            written(
                f"({_SEQUENCES}) % self.trainer.stepsPerBatch == 0",
                lambda s: s.total_samples % s.trainer.steps_per_batch == 0,
            ),
            "batchSize x samplesPerPrompt sequences {} cannot be split into stepsPerBatch equal "
            "steps",
            "trainer.stepsPerBatch",
            lambda s: f"{s.rollout.batch_size} x {s.samples_per_prompt} = {s.total_samples}",
        ),
        Rule(
            written(
                f"({_PROCESSES}) % ({_MODEL_PARALLEL}) == 0",
                lambda s: s.trainer.world_size % s.trainer.model_parallel_size == 0,
            ),
            "nodes x processes of a node {} must be a multiple of tensor x pipeline x context",
            "trainer.parallelism",
            lambda s: str(s.trainer.world_size),
        ),
        Rule(
            written(
                f"({_PROCESSES}) / self.trainer.parallelism.pipeline % "
                "self.trainer.parallelism.expert == 0",
                lambda s: (
                    s.trainer.world_size
                    // s.trainer.parallelism.pipeline
                    % s.trainer.parallelism.expert
                    == 0
                ),
            ),
            "nodes x processes of a node / pipeline {} must be a multiple of expert",
            "trainer.parallelism.expert",
            lambda s: str(s.trainer.world_size // s.trainer.parallelism.pipeline),
        ),
        requires(
            field("weightSync.transport") == "nccl",
            field("trainer.gpusPerNode") > 0,
            "transport nccl needs GPUs (trainer.gpusPerNode > 0); use gloo or disk on CPU",
            "weightSync.transport",
        ),
        requires(
            _VLLM,
            field("weightSync.enginePlugin").is_true,
            "vLLM takes weights through sluice's plugin alone: leave enginePlugin out",
            "weightSync.enginePlugin",
        ),
        requires(
            field("trainer.colocate").is_true,
            field("rollout.engine") != "transformers",
            "the engine transformers cannot give its memory to the trainer: leave colocate out, or "
            "choose rollout.engine sglang",
            "trainer.colocate",
        ),
        requires(
            field("trainer.routingReplay") == "rollout",
            _SGLANG,
            "routingReplay: rollout needs an engine that reports its routing: choose "
            "rollout.engine sglang",
            "trainer.routingReplay",
        ),
        requires(
            field("trainer.deterministic").is_true & (field("trainer.gpusPerNode") > 0),
            _SGLANG
            & field("weightSync.enginePlugin").is_true
            & (field("rollout.gpusPerReplica") == 1)
            & (field("rollout.nodesPerReplica") == 1),
            "deterministic needs an engine that computes as the trainer does: rollout.engine "
            "sglang with weightSync.enginePlugin, on one GPU",
            "trainer.deterministic",
        ),
        # Before the rules of adapters, which would name another way out.
        *POOL_ACROSS_GROUPS,
        *IMAGES_ACROSS_GROUPS,
        requires(
            field("weightSync.pauseMode") == "versions",
            _ADAPTER_SYNC,
            "an engine keeps several versions of an adapter alone: pauseMode: versions needs "
            "weightSync.lora: adapter",
            "weightSync.pauseMode",
        ),
        requires(
            _ADAPTER_SYNC,
            field("trainer.lora").is_set,
            "weightSync.lora: adapter sends adapters, and without trainer.lora all weights train: "
            "leave it out",
            "weightSync.lora",
        ),
        requires(
            _ADAPTER_SYNC,
            (_SGLANG | _VLLM) & field("weightSync.enginePlugin").is_true,
            "only sglang and vllm take adapters, with weightSync.enginePlugin: set "
            "weightSync.lora: merged",
            "weightSync.lora",
        ),
        requires(
            _ADAPTER_SYNC & _VLLM & field("trainer.lora").is_set,
            written(
                "self.trainer.lora.rank * "
                "(self.trainer.lora.?initialise.orValue('default') == 'default' ? 1 : 2) <= 512",
                lambda s: s.trainer.lora.stored_rank <= 512,
            ),
            "vLLM has memory for adapters of rank 512 at most (of PiSSA 256): set "
            "weightSync.lora: merged",
            "weightSync.lora",
        ),
        requires(
            _ADAPTER_SYNC,
            field("model.init") != "random",
            "with weightSync.lora: adapter engines read the model from its checkpoint, which "
            "model.init: random does not use: set weightSync.lora: merged",
            "weightSync.lora",
        ),
        requires(
            _ADAPTER_SYNC,
            written(
                "!has(self.trainer.lora) || !('experts' in self.trainer.lora.targetModules)",
                lambda s: not (s.trainer.lora and s.trainer.lora.experts),
            ),
            "engines take no adapters of experts: set weightSync.lora: merged, or leave experts "
            "out of trainer.lora.targetModules",
            "weightSync.lora",
        ),
        requires(
            field("trainer.lora.quantizeBase").is_set,
            ~_ADAPTER_SYNC,
            "an engine would add the adapter to the weights on disk, and it is trained for "
            "quantized ones: set weightSync.lora: merged",
            "weightSync.lora",
        ),
        requires(
            field("debug.replay").is_set,
            field("rollout.replicas") == 0,
            "debug.replay trains on dumped rollouts, without engines: set rollout.replicas: 0",
            "rollout.replicas",
        ),
        requires(
            field("debug.rolloutOnly").is_true,
            field("model.init") != "random",
            "debug.rolloutOnly needs weights on disk (model.init: pretrained): the engines do not "
            "receive any",
            "debug.rolloutOnly",
        ),
        Rule(
            REWARDED | field("algorithm.distillation").is_set | IS_OFFLINE,
            "there is nothing to learn from: set reward, or algorithm.distillation with a teacher, "
            "or algorithm.loss.type: sft or dpo with given answers",
            "reward",
            reason="FieldValueRequired",
        ),
        requires(
            field("evaluation").is_set & ~REWARDED,
            written(
                "!has(self.evaluation.datasets) || self.evaluation.datasets.all(d, has(d.reward))",
                lambda s: all(dataset.reward for dataset in s.evaluation.datasets),
            ),
            "without spec.reward each data set of the evaluation needs a reward of its own",
            "evaluation.datasets",
            reason="FieldValueRequired",
        ),
        *ENGINE_ARGS,
        *QUANTIZED_ENGINES,
        *SPECULATION,
        *ACROSS_GROUPS,
        *COLOCATION,
        *STORED_WEIGHTS,
        *DISTILLATION_ACROSS_GROUPS,
        *OFFLINE_ACROSS_GROUPS,
        *IMAGE_TRAINING,
        *CHECKPOINT_ACROSS_GROUPS,
        *capacity_rules(_SEQUENCES, _SAMPLES, "self.rollout.sampling.maxResponseTokens"),
    )

    @property
    def total_samples(self) -> int:
        """Number of sequences of one training step."""
        return self.rollout.batch_size * self.samples_per_prompt

    @property
    def samples_per_prompt(self) -> int:
        """Number of samples of a prompt in a training step; 1 for rows with given answers."""
        return 1 if self.algorithm.offline else self.rollout.samples_per_prompt

    @property
    def temperature(self) -> float:
        """Divisor of the trainer's logits: the temperature of sampling, 1 for given answers."""
        return 1.0 if self.algorithm.offline else self.rollout.sampling.temperature

    def with_correction(self) -> RLJobSpec:
        """Return the spec with the default of `algorithm.offPolicy.method` filled in.

        Engines that compute in another precision sample from another policy than the trainer's.
        """
        off_policy = self.algorithm.off_policy
        if off_policy.method is not None:
            return self
        wanted = (
            self.rollout.is_quantized
            and not self.algorithm.offline
            and off_policy.old_log_probs == "trainer"
        )
        settings = off_policy.model_copy(update={"method": "tis" if wanted else "none"})
        algorithm = self.algorithm.model_copy(update={"off_policy": settings})
        return self.model_copy(update={"algorithm": algorithm})

    @property
    def rewarded(self) -> bool:
        """True if samples have a reward, of `reward` or of their environment."""
        environment = self.rollout.environment
        return self.reward is not None or (environment is not None and environment.gives_rewards)

    @property
    def judged(self) -> bool:
        """True if the samples that are trained on have rewards."""
        return self.rewarded and not self.algorithm.offline

    @property
    def row_sources(self) -> list[tuple[str, RowSource]]:
        """Field and source of all prompts and evaluation data that user code yields."""
        named = [
            (f"spec.data.prompts[{i}].source", prompts.source)
            for i, prompts in enumerate(self.data.prompts)
        ]
        named += [
            (f"spec.evaluation.{name}[{i}].source", dataset.source)
            for name, datasets in self._evaluated_rows.items()
            for i, dataset in enumerate(datasets)
        ]
        return [(field, source) for field, source in named if source]

    @property
    def _evaluated_rows(self) -> dict[str, Sequence[PromptSource]]:
        if self.evaluation is None:
            return {}
        return {"datasets": self.evaluation.datasets, "heldOut": self.evaluation.held_out}

    @property
    def evaluates(self) -> bool:
        """True if engines answer held-out prompts."""
        return self.evaluation is not None and bool(self.evaluation.datasets)

    @property
    def generates(self) -> bool:
        """True if engines generate samples, for training or for an evaluation."""
        return not self.debug.replay and (not self.algorithm.offline or self.evaluates)

    @property
    def replicas(self) -> int:
        """Number of engines that the job uses.

        With given answers engines only evaluate, so it is 0 without an evaluation. With colocate
        they fill the trainer's GPUs. With a pool it is `rollout.replicas`, in which the planner
        puts the number of the pool's engines.
        """
        rollout = self.rollout
        if self.algorithm.offline and not self.evaluates:
            return 0
        if self.uses_pool:
            return rollout.replicas
        if self.trainer.colocate and self.on_gpu:
            return self.trainer.nodes * self.trainer.gpus_per_node // rollout.gpus_per_replica
        return max(rollout.replicas, rollout.min_replicas) if rollout.replicas else 0

    @property
    def uses_pool(self) -> bool:
        """True if the engines are those of an RLEnginePool, and the job starts none."""
        return self.rollout.pool is not None

    @property
    def computes_versions(self) -> bool:
        """True if SGLang's kernels compute the adapters of several weight versions in a batch."""
        return self.weight_sync.pause_mode == "versions" and self.rollout.engine == "sglang"

    @property
    def adapter_problem(self) -> str:
        """Why engines would refuse the layers of an adapter that they get alone; empty if none.

        An API server does not check it, because lists are costly in CEL.
        """
        lora = self.trainer.lora
        refused = (
            self.weight_sync.lora == "adapter"
            and self.computes_versions
            and lora is not None
            and not lora.attention_is_whole
        )
        return (
            "with pauseMode: versions SGLang joins q_proj, k_proj and v_proj: an adapter of one of "
            "them needs q_proj and v_proj; add them, or set another weightSync.pauseMode"
            if refused
            else ""
        )

    @property
    def own_engines(self) -> int:
        """Number of engines that the job starts."""
        return 0 if self.uses_pool else self.replicas

    def transport(self, *, one_machine: bool) -> str:
        """Return the transport of weights. one_machine: whether the job runs outside a cluster."""
        # Pods that share GPUs can share memory on one machine, but not in a cluster.
        if self.weight_sync.transport:
            return self.weight_sync.transport
        if self.trainer.colocate:
            return "ipc" if one_machine else "disk"
        return "nccl" if self.on_gpu else "gloo"

    @property
    def separate_checkpoints(self) -> bool:
        """True if checkpoints are in an object store, and no volume is shared by pods.

        Weights that travel over the disk need a shared volume all the same.
        """
        return self.checkpoint.to is not None and self.transport(one_machine=False) != "disk"

    @property
    def on_gpu(self) -> bool:
        return self.trainer.gpus_per_node > 0


class ObjectMeta(Model):
    """The part of Kubernetes' object metadata that sluice reads; the rest passes through."""

    model_config = Model.model_config | {"extra": "allow"}

    name: ShortName = Field(
        description="Pods and other objects add their own suffixes to it, so it has at most 40 "
        "characters."
    )
    namespace: str = "default"
    uid: str = ""
    creation_timestamp: str = ""
    generation: int = 1
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class RLJob(Model):
    """Reinforcement-learning run: a trainer, its rollout engines, and the buffer between them."""

    api_version: Literal["sluice.dev/v1alpha1"] = API_VERSION
    kind: Literal["RLJob"] = "RLJob"
    metadata: ObjectMeta
    spec: RLJobSpec
    status: RLJobStatus | None = None

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"
