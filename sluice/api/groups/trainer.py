"""spec.trainer: what trains, how it is laid out, and its optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.groups.lifecycle import Topology
from sluice.api.groups.resources import Resources
from sluice.api.schema.base import (
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from sluice.api.schema.kubernetes_fields import PodTemplate
from sluice.api.schema.rules import Rule, any_given, exactly_one, field, only_with, requires

FIRST_TOKENS, MOST_TOKENS = 8192, 32_768
"""Of a micro-batch on a GPU, where the job does not say: to begin with, and where it stops to grow,
because kernels are large enough."""
Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "mlp", "moe", "shared_experts", "mla_up_proj"]


class Parallelism(Model):
    """How model and sequences are spread over trainer processes.
    What is left of them is data parallel.
    """

    tensor: PositiveInt = Field(
        1,
        description="Ranks that share every matrix, and the tokens between them (sequence "
        "parallel).",
    )
    pipeline: PositiveInt = Field(1, description="Ranks that share the layers.")
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

    first_stage_layers: PositiveInt | None = Field(
        None,
        description="Layers of the first pipeline rank, which has the embedding besides. "
        "Default: equally many as the others.",
    )
    last_stage_layers: PositiveInt | None = Field(
        None,
        description="Layers of the last pipeline rank, which has the output layer besides. "
        "Default: equally many as the others.",
    )

    rules = (
        requires(
            any_given("firstStageLayers", "lastStageLayers"),
            (field("pipeline") > 1) & ~field("virtualPipeline").given,
            "firstStageLayers and lastStageLayers need pipeline of at least 2, without "
            "virtualPipeline",
            "firstStageLayers",
        ),
        only_with(
            "virtualPipeline",
            field("pipeline") > 1,
            "virtualPipeline needs pipeline of at least 2",
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
    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="How Adam's mean of the gradients is stored; it computes in fp32. bf16 needs "
        "backend: megatron.",
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="How Adam's mean of the gradients' squares is stored. In bf16 it is rounded "
        "up or down so that it is right on average.",
    )


_MEGATRON = field("backend") == "megatron"
_FSDP = field("backend") == "fsdp"


def _whole(name: str) -> Rule:
    """FSDP2 spreads parameters and sequences over all ranks, and cannot share them otherwise."""
    return only_with(
        f"parallelism.{name}",
        _MEGATRON,
        f"backend: fsdp has no parallelism.{name}: it spreads parameters and sequences over all "
        "trainer processes; leave it out, or choose backend: megatron",
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
    cpu_offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="What the trainer keeps in host memory also while it trains, for models that "
        "do not fit otherwise; the CPU takes the optimizer's step. optimizer: Adam's moments and "
        "the weights in fp32, with backend: megatron. all: weights and gradients too, with "
        "backend: fsdp.",
    )
    cpu_offload_fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="How much of the optimizer lies in host memory, with cpuOffload: optimizer; "
        "the GPU takes the step of the rest. Default: 1, all of it.",
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
    max_tokens_per_gpu: PositiveInt | None = Field(
        None,
        description="Tokens of one micro-batch; a longer sequence goes alone. Default: 2048 on "
        "CPU; on GPUs 8192 at first, then up to 32768, as far as the memory that steps took "
        "allows (with deterministic 8192).",
    )
    balance: Literal["tokens", "flops"] = Field(
        "tokens",
        description="What every data-parallel rank gets equally much of in a batch. The loss does "
        "not depend on it. flops: a sequence of n tokens costs n (1 + n / n0), with n0 from the "
        "model's config.json, because attention makes long sequences dearer than their tokens.",
    )
    recompute: Recompute = Field(
        "none",
        description="Activations that the backward pass computes again instead of keeping them. "
        "full: all of a layer; selective: those of recomputeModules.",
    )
    recompute_modules: Annotated[list[RecomputeModule], Field(min_length=1, max_length=8)] = Field(
        ["core_attn"],
        description="Parts of a layer, for recompute: selective. Names are Megatron's.",
    )
    routing_replay: Literal["none", "trainer", "rollout"] = Field(
        "none",
        description="In a mixture's optimizer steps tokens go where they went before. rollout: to "
        "the experts that the engine chose (R3). trainer: to those that the trainer's log-prob "
        "pass at the start of the batch chose (R2).",
    )
    deterministic: bool = Field(
        False,
        description="Trainer and engine compute each token alike, to the bit, whatever else is in "
        "its batch; and a step that is trained again gives the same weights. Slower. Dense models, "
        "one GPU for each engine.",
    )
    precision: Literal["bf16", "fp32"] | None = Field(
        None, description="Default: bf16 on GPU, fp32 on CPU."
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Of a trainer pod's container. Default: requests of 2 CPUs and 8Gi for each "
        "GPU, and a memory limit of 256Gi for each; without GPUs 250m and 1Gi for each process, "
        "at most 32Gi.",
    )
    topology: Topology | None = Field(
        None, description="Domain of the cluster for the trainer's pods."
    )
    template: PodTemplate = Field(
        default_factory=dict, description="Pod template, merged over ours (strategic merge)."
    )

    rules = (
        exactly_one("steps", "epochs", field="steps"),
        Rule(
            ~field("offload").given | (field("offload") == "none") | field("colocate").is_true,
            "only a trainer that shares its GPUs offloads: it needs colocate: true",
            "offload",
        ),
        requires(
            field("cpuOffload") == "all",
            _FSDP,
            "only backend: fsdp trains from host memory: with backend: megatron choose "
            "cpuOffload: optimizer",
            "cpuOffload",
        ),
        requires(
            field("cpuOffload") == "optimizer",
            _MEGATRON,
            "backend: fsdp has all in host memory or nothing: cpuOffload all or none",
            "cpuOffload",
        ),
        only_with("cpuOffloadFraction", field("cpuOffload") == "optimizer"),
        requires(
            any_given("optimizer.expAvgDtype", "optimizer.expAvgSqDtype"),
            _MEGATRON,
            "backend: fsdp keeps Adam's moments in fp32",
            "optimizer",
        ),
        requires(
            field("recompute") == "selective",
            _MEGATRON,
            "backend: fsdp recomputes whole layers: recompute full or none",
            "recompute",
        ),
        only_with("routingReplay", _MEGATRON, "only backend: megatron replays routing"),
        requires(
            field("routingReplay") == "trainer",
            field("stepsPerBatch") > 1,
            "with one optimizer step per batch there is no log-prob pass before it, and no ratio "
            "that experts could move: set stepsPerBatch, or routingReplay: rollout for the "
            "engine's experts",
            "routingReplay",
        ),
        only_with(
            "deterministic",
            _MEGATRON
            & ~any_given(*(f"parallelism.{name}" for name in ("tensor", "context", "expert"))),
            "deterministic needs backend: megatron without tensor, context and expert "
            "parallelism: ranks that share a sum add in another order than the engine",
        ),
        requires(
            field("deterministic").is_true & (field("precision") == "fp32"),
            field("gpusPerNode") == 0,
            "on GPUs deterministic needs precision: bf16, as the engine has it",
            "precision",
        ),
        *map(_whole, ("tensor", "pipeline", "context", "expert")),
    )

    @property
    def offloaded(self) -> Literal["none", "optimizer", "all"]:
        """The parts of the trainer that lie in host memory while the engines generate."""
        return self.offload or ("all" if self.colocate and self.gpus_per_node else "none")

    @property
    def optimizer_on_host(self) -> float:
        """The fraction of Megatron's optimizer that lies in host memory while it trains."""
        return (self.cpu_offload_fraction or 1.0) if self.cpu_offload == "optimizer" else 0.0

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch on each GPU at first, or in each process on CPU.

        Host memory is small beside a GPU's: 2,048 tokens of a model of 135M parameters keep 4 GB
        of activations in float32.
        """
        return self.max_tokens_per_gpu or (FIRST_TOKENS if self.gpus_per_node else 2048)

    @property
    def micro_batches_grow(self) -> bool:
        """True where the memory of GPUs says how large micro-batches become, because nobody else
        has. `deterministic` asks for the same rows after a restart.
        """
        return bool(self.gpus_per_node) and not (self.max_tokens_per_gpu or self.deterministic)

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
