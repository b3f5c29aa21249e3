"""spec.trainer: processes, layout and optimizer of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.groups.lifecycle import Topology
from sluice.api.groups.lora import Lora
from sluice.api.groups.resources import Resources
from sluice.api.schema.base import (
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from sluice.api.schema.kubernetes_fields import PodTemplate
from sluice.api.schema.paths import UserFunction
from sluice.api.schema.rules import Rule, any_set, exactly_one, field, only_with, requires, written

# Default tokens of a micro-batch on a GPU: at first, and at most. Larger ones do not speed up
# kernels.
FIRST_TOKENS, MOST_TOKENS = 8192, 32_768
Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "mlp", "moe", "shared_experts", "mla_up_proj"]


class Parallelism(Model):
    """Distribution of model and sequences over trainer processes.

    Processes that remain are data parallel.
    """

    tensor: PositiveInt = Field(
        1,
        description="Number of ranks that share every matrix, and the tokens between "
        "matrices (sequence parallel).",
    )
    pipeline: PositiveInt = Field(1, description="Number of ranks that share the layers.")
    context: PositiveInt = Field(
        1,
        description="Number of ranks that share the tokens of a micro-batch, which may then "
        "have this many times maxTokensPerGpu. With backend: fsdp they share the heads of "
        "attention, whose number must be a multiple (DeepSpeed-Ulysses).",
    )
    expert: PositiveInt = Field(
        1,
        description="Number of ranks that share the experts of a mixture, across tensor, "
        "context and data parallel ranks.",
    )
    virtual_pipeline: Annotated[int, Field(ge=2, le=1024)] | None = Field(
        None,
        description="Number of runs of layers on each pipeline rank. More runs make smaller "
        "bubbles and more messages. Default: one.",
    )

    first_stage_layers: PositiveInt | None = Field(
        None,
        description="Number of layers on the first pipeline rank, which also has the "
        "embedding. Default: as many as on the others.",
    )
    last_stage_layers: PositiveInt | None = Field(
        None,
        description="Number of layers on the last pipeline rank, which also has the output "
        "layer. Default: as many as on the others.",
    )

    rules = (
        requires(
            any_set("firstStageLayers", "lastStageLayers"),
            (field("pipeline") > 1) & ~field("virtualPipeline").is_set,
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
    """AdamW, with its state distributed over the ranks."""

    lr: NonNegativeFloat = Field(1e-6, description="Learning rate after the warm-up.")
    min_lr: NonNegativeFloat = Field(0.0, description="Learning rate at the end of the schedule.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate from lr to minLr."
    )
    warmup_steps: NonNegativeInt = Field(
        0, description="Number of optimizer steps of linear warm-up from 0."
    )
    decay_steps: PositiveInt | None = Field(
        None,
        description="Length of the schedule in optimizer steps. Default: all steps of the run.",
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW's decoupled weight decay.")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="Decay of Adam's mean of the gradients."
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.95, description="Decay of Adam's mean of the squared gradients."
    )
    eps: PositiveFloat = Field(1e-8, description="Constant that Adam adds to the denominator.")
    clip_grad: NonNegativeFloat = Field(
        1.0, description="Largest norm of the gradient. 0: no limit."
    )
    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Type in which Adam's mean of the gradients is stored. It is computed in "
        "fp32. bf16 needs backend: megatron.",
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Type in which Adam's mean of the squared gradients is stored. With bf16 "
        "it is rounded up or down at random, so that it is right on average.",
    )


_MEGATRON = field("backend") == "megatron"
_FSDP = field("backend") == "fsdp"


def _whole(name: str) -> Rule:
    """FSDP2 spreads parameters over all ranks, and cannot share them otherwise."""
    return only_with(
        f"parallelism.{name}",
        _MEGATRON,
        f"backend: fsdp has no parallelism.{name}: it spreads parameters over all trainer "
        "processes; leave it out, or choose backend: megatron",
    )


# Parts of a vision-language model besides its language model.
VisionPart = Literal["vision", "projector"]
VISION_PARTS: tuple[VisionPart, ...] = ("vision", "projector")


class Mtp(Model):
    """Training of the layer that predicts a further token (multi-token prediction).

    It learns from the responses of each batch, beside the policy, whose gradients stay as they are.
    """

    lr: PositiveFloat | None = Field(
        None,
        description="Learning rate of the layer, on the optimizer's schedule. Default: "
        "optimizer.lr.",
    )


class TrainerHooksSpec(Model):
    """Own functions (context) that every rank of the trainer calls. They return nothing."""

    init: UserFunction | None = Field(
        None, description="Called once the ranks know each other, before the model is built."
    )
    before_log_probs: UserFunction | None = Field(
        None,
        description="Called before policy, reference or teacher compute log-probs without "
        "gradients; the context names the model.",
    )
    before_train_step: UserFunction | None = Field(
        None, description="Called before each optimizer step."
    )
    timeout_seconds: PositiveFloat = Field(
        600.0,
        description="Seconds after which a call has failed, and the trainer restarts from its last "
        "checkpoint.",
    )


class Trainer(Model):
    """Trainer: its processes, its layout and its optimizer."""

    nodes: PositiveInt = Field(1, description="Number of trainer pods.")
    gpus_per_node: NonNegativeInt = Field(
        1, description="Number of GPUs, and of trainer processes, of one pod. 0: CPU."
    )
    colocate: bool = Field(
        False,
        description="Trainer and engines share the same GPUs and take turns. Needs "
        "rollout.mode: sync.",
    )
    offload: Literal["none", "optimizer", "all"] | None = Field(
        None,
        description="What the trainer moves to host memory while the engines generate, with "
        "colocate. Default: all on GPUs, none on CPU.",
    )
    cpu_offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="What the trainer keeps in host memory also while it trains, for models "
        "that do not fit otherwise. The CPU then runs the optimizer step. optimizer: Adam's "
        "moments and the weights in fp32, with backend: megatron. all: weights and gradients "
        "too, with backend: fsdp.",
    )
    cpu_offload_fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Fraction of the optimizer in host memory, with cpuOffload: optimizer. "
        "The GPU runs the step of the rest. Default: 1.",
    )
    processes_per_node: PositiveInt | None = Field(
        None,
        description="Number of trainer processes of one pod. Default: gpusPerNode, or 1 on CPU.",
    )
    backend: Literal["megatron", "fsdp"] = Field(
        "megatron",
        description="megatron: the fastest, for the model families in docs/models.md. fsdp: "
        "FSDP2, for any causal language model of transformers.",
    )
    lora: Lora | None = Field(
        None, description="Train low-rank adapters instead of all weights. Default: all weights."
    )
    mtp: Mtp | None = Field(
        None,
        description="Also train the layer of the checkpoint that predicts a further token, as in "
        "DeepSeek-V3, GLM-4.5 and Qwen3.5, so that rollout.speculative.algorithm: mtp proposes "
        "well while the policy changes. Needs backend: fsdp. Default: it stays as it is.",
    )
    freeze: Annotated[list[VisionPart], Field(max_length=2)] | None = Field(
        None,
        description="Parts of a vision-language model (data.images) that are not trained. vision: "
        "the tower. projector: the layers between tower and language model. []: all is trained. "
        "Default: both.",
    )
    parallelism: Parallelism = Field(default_factory=Parallelism)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    steps: PositiveInt | None = Field(
        None, description="Number of training steps (batches). Exactly one of steps and epochs."
    )
    epochs: PositiveInt | None = Field(
        None, description="Number of passes over the prompts. Exactly one of steps and epochs."
    )
    steps_per_batch: PositiveInt = Field(
        1, description="Number of optimizer steps that a batch is split into."
    )
    max_tokens_per_gpu: PositiveInt | None = Field(
        None,
        description="Largest number of tokens of a micro-batch. A longer sequence has a "
        "micro-batch to itself. Default: 2048 on CPU; on GPUs 8192 at first, then up to "
        "32768, as far as the memory used by earlier steps allows (8192 with deterministic).",
    )
    balance: Literal["tokens", "flops"] = Field(
        "tokens",
        description="Cost by which a batch is shared out equally to data-parallel ranks. The "
        "loss does not depend on it. tokens: the number of tokens. flops: n (1 + n / n0) for "
        "a sequence of n tokens, with n0 from the model's config.json, because attention "
        "makes long sequences more expensive than their tokens.",
    )
    recompute: Recompute = Field(
        "none",
        description="Activations that the backward pass computes again instead of keeping. "
        "full: all of a layer. selective: those of recomputeModules.",
    )
    recompute_modules: Annotated[list[RecomputeModule], Field(min_length=1, max_length=8)] = Field(
        ["core_attn"],
        description="Parts of a layer for recompute: selective, by their names in Megatron.",
    )
    routing_replay: Literal["none", "trainer", "rollout"] = Field(
        "none",
        description="Experts that tokens of a mixture are sent to in optimizer steps. none: "
        "the router's choice. rollout: those that the engine chose (R3). trainer: those of "
        "the trainer's log-prob pass at the start of the batch (R2).",
    )
    deterministic: bool = Field(
        False,
        description="Trainer and engine compute each token with the same bits, whatever else "
        "is in its batch, and a step that is trained again gives the same weights. Slower. "
        "For dense models, with one GPU per engine.",
    )
    precision: Literal["bf16", "fp32"] | None = Field(
        None, description="Type of weights and activations. Default: bf16 on GPUs, fp32 on CPU."
    )
    fake_quantize: bool = Field(
        False,
        description="Quantization-aware training: compute with the weights that engines have with "
        "rollout.precision, and pass gradients to the weights as they are (straight-through). "
        "Needs backend: fsdp.",
    )
    hooks: TrainerHooksSpec = Field(default_factory=TrainerHooksSpec)
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of a trainer pod's container. Default: requests of 2 CPUs and "
        "8Gi and a memory limit of 256Gi for each GPU; without GPUs 250m and 1Gi for each "
        "process, at most 32Gi.",
    )
    topology: Topology | None = Field(
        None, description="Domain of the cluster for the trainer's pods."
    )
    template: PodTemplate = Field(
        default_factory=dict,
        description="Pod template, merged over that of sluice (strategic merge).",
    )

    rules = (
        exactly_one("steps", "epochs", field="steps"),
        Rule(
            ~field("offload").is_set | (field("offload") == "none") | field("colocate").is_true,
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
        requires(
            written(
                "has(self.lora) && 'experts' in self.lora.targetModules",
                lambda trainer: bool(trainer.lora and trainer.lora.experts),
            ),
            _FSDP,
            "only backend: fsdp trains adapters of experts: with backend: megatron leave experts "
            "out of targetModules",
            "lora.targetModules",
        ),
        requires(
            field("lora.quantizeBase").is_set,
            _FSDP,
            "only backend: fsdp trains adapters of a quantized base: with backend: megatron leave "
            "quantizeBase out",
            "lora.quantizeBase",
        ),
        only_with("cpuOffloadFraction", field("cpuOffload") == "optimizer"),
        requires(
            field("cpuOffload") == "optimizer",
            ~field("lora").is_set,
            "the optimizer of an adapter has megabytes: leave cpuOffload out",
            "cpuOffload",
        ),
        requires(
            field("deterministic").is_true,
            ~field("lora").is_set,
            "the trainer adds an adapter to the output of a layer and the engine to its weights, "
            "which rounds differently: leave deterministic or lora out",
            "deterministic",
        ),
        requires(
            any_set("optimizer.expAvgDtype", "optimizer.expAvgSqDtype"),
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
        only_with(
            "fakeQuantize",
            _FSDP,
            "only backend: fsdp computes with quantized weights: leave fakeQuantize out, or choose "
            "backend: fsdp",
        ),
        requires(
            field("fakeQuantize").is_true,
            ~field("lora").is_set,
            "engines quantize the sum of base and adapter, which the trainer keeps apart: leave "
            "fakeQuantize or lora out",
            "fakeQuantize",
        ),
        only_with(
            "mtp",
            _FSDP & (field("parallelism.context") == 1) & ~field("lora").is_set,
            "only backend: fsdp, without lora and parallelism.context, trains the layer that "
            "predicts a further token: leave mtp out",
        ),
        requires(
            field("fakeQuantize").is_true,
            ~field("mtp").is_set,
            "engines do not quantize the layer that predicts a further token: leave fakeQuantize "
            "or mtp out",
            "fakeQuantize",
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
            & ~any_set(*(f"parallelism.{name}" for name in ("tensor", "context", "expert"))),
            "deterministic needs backend: megatron without tensor, context and expert "
            "parallelism: ranks that share a sum add in another order than the engine",
        ),
        requires(
            field("deterministic").is_true & (field("precision") == "fp32"),
            field("gpusPerNode") == 0,
            "on GPUs deterministic needs precision: bf16, as the engine has it",
            "precision",
        ),
        *map(_whole, ("tensor", "pipeline", "expert")),
    )

    @property
    def trained_parts(self) -> frozenset[VisionPart]:
        """Parts of a vision-language model that are trained besides its language model."""
        frozen = VISION_PARTS if self.freeze is None else self.freeze
        return frozenset(VISION_PARTS) - set(frozen)

    @property
    def offloaded(self) -> Literal["none", "optimizer", "all"]:
        """Parts of the trainer that are in host memory while the engines generate."""
        return self.offload or ("all" if self.colocate and self.gpus_per_node else "none")

    @property
    def optimizer_on_host(self) -> float:
        """Fraction of Megatron's optimizer that is in host memory while it trains."""
        return (self.cpu_offload_fraction or 1.0) if self.cpu_offload == "optimizer" else 0.0

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch on each GPU at first, or in each process on CPU."""
        # On CPU memory is scarce: 2,048 tokens of a 135M model keep 4 GB of activations in fp32.
        return self.max_tokens_per_gpu or (FIRST_TOKENS if self.gpus_per_node else 2048)

    @property
    def micro_batches_grow(self) -> bool:
        """True if micro-batches grow with the free memory of GPUs."""
        # `deterministic` needs the same rows in a micro-batch after a restart.
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
