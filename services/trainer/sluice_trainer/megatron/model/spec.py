"""Layer specs of each family.

Megatron's modules with this package's attention, norms and experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from sluice_trainer.megatron.model.attention import PackedAttention
from sluice_trainer.megatron.model.expert_dispatch import Mixture
from sluice_trainer.megatron.model.experts import GroupedExperts
from sluice_trainer.megatron.model.norms import HeadNorm, Norm
from sluice_trainer.megatron.model.rotary import LatentRotary, Rotary
from sluice_trainer.model.huggingface_config import ModelShape


class _SandwichAttention(SelfAttention):  # type: ignore[misc]
    """Attention followed by a norm (GLM-4)."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.post_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(*args, **options)
        return self.post_layernorm(output), bias


class _SandwichMLP(MLP):  # type: ignore[misc]
    """An MLP followed by a norm (GLM-4)."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.post_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(*args, **options)
        return self.post_layernorm(output), bias


class _LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention with the right gradient of the shared key channels under tensor parallelism.

    With local layers Megatron gathers the down-projected keys by columns, and never sums over ranks
    the gradient of the rotating channels, which every rank uses for its heads. This class scatters
    them along the sequence. Megatron then gathers them along the sequence again, and that gather
    sums gradients in its backward pass.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Allow queries without a norm, which Megatron supports only with TransformerEngine."""
        if self.config.q_lora_rank is not None:
            resolved: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
            return resolved
        return {
            name: getattr(submodules, name)
            for name in ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")
        }

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = super()._qkv_down_projection(hidden_states)
        if keys.size(-1) != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            keys = scatter_to_sequence_parallel_region(
                gather_from_tensor_model_parallel_region(keys)
            )
        return queries, keys


def block_spec(
    config: TransformerConfig, shape: ModelShape, device: torch.device, stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the decoder layers of this pipeline stage (or of the virtual stage `stage` of it)."""
    dense, mixture = (
        _layer(config, shape, device, None),
        _layer(config, shape, device, config.num_moe_experts),
    )
    layers = [mixture if shape.is_mixture(layer) else dense for layer in range(shape.layers)]
    first = get_transformer_layer_offset(config, stage)
    stage_layers = layers[first : first + get_num_layers_to_build(config, stage)]
    return TransformerBlockSubmodules(layer_specs=stage_layers, layer_norm=Norm)


def _layer(
    config: TransformerConfig, shape: ModelShape, device: torch.device, experts: int | None
) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=shape.latent is not None,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if experts:
        mixture = parts.mlp.keywords["submodules"]
        grouped = partial(GroupedExperts, **mixture.experts.keywords)
        parts.mlp = partial(Mixture, submodules=replace(mixture, experts=grouped))
    attention = parts.self_attention.submodules
    if shape.latent:
        parts.self_attention.module = _LatentAttention
        attention.core_attention = PackedAttention
        attention.q_layernorm = IdentityOp if shape.latent.query_rank is None else Norm
        attention.kv_layernorm = Norm
        return layer
    rotary = Rotary(
        shape.rope.inverse_frequencies(shape.rope_dim).to(device), shape.rope_interleaved
    )
    attention.core_attention = partial(PackedAttention, rotary=rotary)
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    if shape.post_norms:
        parts.self_attention.module = _SandwichAttention
        parts.mlp = partial(_SandwichMLP.as_mlp_submodule, **parts.mlp.keywords)
    return layer


def join_head_norms(model: Any) -> None:
    """Give each attention of a GPTModel the norms of its queries and keys."""
    for layer in model.decoder.layers:
        attention = layer.self_attention
        norms = [getattr(attention, name, None) for name in ("q_layernorm", "k_layernorm")]
        if isinstance(norms[0], HeadNorm):
            attention.core_attention.norms = tuple(norms)


def set_latent_rotary(model: Any, shape: ModelShape, device: torch.device) -> None:
    """Replace Megatron's rotary embedding in each latent attention of a GPTModel."""
    rotary = LatentRotary(shape.rope.inverse_frequencies(shape.rope_dim).to(device))
    for layer in model.decoder.layers:
        layer.self_attention.rotary_pos_emb = rotary
