"""Megatron's configuration, derived from a model's shape and a parallel layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from sluice.api import Parallelism
from sluice.api.groups.trainer import Recompute, RecomputeModule
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.kernels.compiled import COMPILED
from sluice_trainer.model.huggingface_config import Experts, LatentAttention, ModelShape
from sluice_trainer.model.unsupported import UnsupportedModelError


def check_layout(shape: ModelShape, parallelism: Parallelism) -> None:
    """Check that the model can be split like this.

    Raises
    ------
    UnsupportedModelError
        With every reason why it cannot.

    """
    problems = [
        f"trainer.parallelism.{field} {size} must divide the {what}"
        for field, size, what, number in _divisions(shape, parallelism)
        if number % size
    ]
    if parallelism.expert > 1 and shape.experts is None:
        problems.append(
            f"trainer.parallelism.expert {parallelism.expert}: {shape.model_type} has no experts"
        )
    problems += _stage_problems(shape.layers, parallelism)
    if problems:
        raise UnsupportedModelError("; ".join(problems))


def check_deterministic(shape: ModelShape) -> None:
    """Raise UnsupportedModelError if `trainer.deterministic` does not support the model."""
    problems = {
        "experts": shape.experts is not None,
        "latent attention": shape.latent is not None,
        "norms behind its parts": shape.post_norms,
        f"rotary positions of kind {shape.rope.kind}": shape.rope.kind != "default",
    }
    if unsupported := [what for what, present in problems.items() if present]:
        raise UnsupportedModelError(
            f"trainer.deterministic: {shape.model_type} has {' and '.join(unsupported)}, which "
            "trainer and engine do not compute alike: leave deterministic out"
        )


def check_mixture(shape: ModelShape) -> None:
    """Raise UnsupportedModelError if the model has no experts for `trainer.routingReplay`."""
    if shape.experts is None:
        raise UnsupportedModelError(
            f"trainer.routingReplay: {shape.model_type} has no experts: leave routingReplay out"
        )


def _stage_problems(layers: int, parallelism: Parallelism) -> list[str]:
    """Return why stages of unequal sizes cannot hold these layers; empty if they can."""
    ends = {
        "firstStageLayers": parallelism.first_stage_layers,
        "lastStageLayers": parallelism.last_stage_layers,
    }
    named = {name: size for name, size in ends.items() if size is not None}
    if not named:
        return []
    left, stages = layers - sum(named.values()), parallelism.pipeline - len(named)
    if (left == 0) if stages == 0 else (left > 0 and left % stages == 0):
        return []
    sizes = " and ".join(f"trainer.parallelism.{name} {size}" for name, size in named.items())
    rest = f"{stages} equal stages" if stages else "no stage"
    return [f"{sizes} of {layers} layers leave {left} for {rest}"]


def _divisions(shape: ModelShape, parallelism: Parallelism) -> list[tuple[str, int, str, int]]:
    """Return (field, its size, what it divides in words, how much there is of that)."""
    tensor, stages = parallelism.tensor, parallelism.pipeline * (parallelism.virtual_pipeline or 1)
    name = "pipeline x virtualPipeline" if parallelism.virtual_pipeline else "pipeline"
    widths = {"key/value heads": shape.kv_heads, "channels of the feed-forward layers": shape.ffn}
    if shape.latent:
        widths = {
            "attention heads": shape.heads,
            "channels of the feed-forward layers": shape.ffn,
            "channels of the compressed queries": shape.latent.query_rank or tensor,
            "channels of the compressed keys and values": shape.latent.kv_rank
            + shape.latent.rope_dim,
        }
    if shape.experts and shape.experts.shared_ffn:
        widths["channels of the shared experts"] = shape.experts.shared_ffn
    equal = parallelism.first_stage_layers is None and parallelism.last_stage_layers is None
    return [
        *(("tensor", tensor, f"{number} {what}", number) for what, number in widths.items()),
        *([(name, stages, f"{shape.layers} layers into equal stages", shape.layers)] * equal),
        *(
            ("expert", parallelism.expert, f"{e.count} experts", e.count)
            for e in (shape.experts,)
            if e
        ),
    ]


def transformer_config(
    shape: ModelShape,
    parallelism: Parallelism,
    *,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    recompute_modules: Sequence[RecomputeModule] = (),
    deterministic: bool = False,
) -> TransformerConfig:
    """Return Megatron's configuration: local layers without dropout.

    Fusions that need TransformerEngine or Apex are off.

    Parameters
    ----------
    shape
        Shape of the model.
    parallelism
        Sizes of the parallel dimensions.
    dtype
        Precision of weights and activations.
    recompute
        Which activations are recomputed.
    recompute_modules
        Modules to recompute with `selective`.
    deterministic
        Compute exactly as the engine does (`sluice_trainer.model.deterministic`).

    Raises
    ------
    UnsupportedModelError
        If the model does not fit the layout or these options.

    """
    check_layout(shape, parallelism)
    if deterministic:
        check_deterministic(shape)
    if recompute == "selective" and "mla_up_proj" in recompute_modules and not shape.latent:
        raise UnsupportedModelError(
            f"trainer.recomputeModules: mla_up_proj: {shape.model_type} has no latent attention"
        )
    kind = MLATransformerConfig if shape.latent else TransformerConfig
    return kind(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        softmax_scale=_magnitude(shape) ** 2 / math.sqrt(shape.head_dim),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are always loaded, even random ones, so Megatron need not draw any.
        perform_initialization=False,
        use_cpu_initialization=DEVICE.type == "cpu",
        # The weights of `aggregation` hold the denominators, so gradients of micro-batches and
        # ranks are plain sums.
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=COMPILED and not deterministic,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=True,  # by `fused_operations`
        persist_layer_norm=False,
        deterministic_mode=deterministic,
        **_parallel(parallelism),
        **_experts(shape.experts),
        **_latent(shape.latent),
        **_recompute(recompute, recompute_modules),
    )


def _magnitude(shape: ModelShape) -> float:
    return shape.latent.magnitude if shape.latent else shape.rope.attention_factor


def _recompute(kind: Recompute, modules: Sequence[RecomputeModule]) -> dict[str, Any]:
    if kind == "none":
        return {}
    if kind == "selective":
        return {"recompute_granularity": kind, "recompute_modules": list(modules)}
    return {
        "recompute_granularity": kind,
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def _parallel(parallelism: Parallelism) -> dict[str, Any]:
    options: dict[str, Any] = {
        "tensor_model_parallel_size": parallelism.tensor,
        "pipeline_model_parallel_size": parallelism.pipeline,
        "virtual_pipeline_model_parallel_size": parallelism.virtual_pipeline,
        "num_layers_in_first_pipeline_stage": parallelism.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallelism.last_stage_layers,
        "context_parallel_size": parallelism.context,
        "expert_model_parallel_size": parallelism.expert,
        # An expert is a small matrix and never split; ranks of a tensor group hold different
        # experts.
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallelism.tensor > 1,
        # Packed micro-batches differ in length, so pipeline stages must exchange shapes.
        "variable_seq_lengths": parallelism.pipeline > 1,
        # Megatron requires this value with variable lengths, even without experts.
        "moe_token_dispatcher_type": "alltoall",
    }
    if parallelism.virtual_pipeline:
        # Other settings make the interleaved schedule exchange the wrong tensors, silently.
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return options


def _experts(experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return {}
    grouped = {
        "moe_router_num_groups": experts.groups,
        "moe_router_group_topk": experts.group_limit,
    }
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(mixture) for mixture in experts.layers],
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_router_score_function": experts.score,
        # Softmax over the chosen experts equals the softmax over all, normalised.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalised,
        "moe_router_topk_scaling_factor": experts.scaling if experts.scaling != 1.0 else None,
        "moe_router_enable_expert_bias": experts.choice_bias,
        "moe_router_bias_update_rate": 0.0,
        # In bf16, trainer and engine resolve near ties between experts differently.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        **(grouped if experts.groups > 1 else {}),
    }


def _latent(latent: LatentAttention | None) -> dict[str, Any]:
    if latent is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        # Angles come from `LatentRotary`, so Megatron's scalings are off.
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }
