"""Attention over packed sequences, through Megatron's layer spec.

A micro-batch is one row of tokens, several sequences end to end. Megatron's own packed path wants TransformerEngine for
the attention and rotates one sequence after another in Python. Here the row goes through Megatron as an ordinary batch
of one; `Packing` travels beside it and tells the two places that look across tokens where sequences begin:
`PackedRotary` (positions) and `PackedAttention` (who sees whom).
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from sluice_trainer.megatron.hf_config import Rope

_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 has no grouped queries here, 2.13 has."""

BUCKET = 16
"""Sequences are padded to multiples of this, and to powers of two above four times it, when attention is dense."""


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Where sequences lie in a row of tokens.

    positions: [tokens] int64, within each sequence; lengths: of the sequences; cu_seqlens_q: [sequences + 1] int32.
    qkv_format stays "sbhd", so that Megatron treats the row as one ordinary sequence.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    lengths: tuple[int, ...] = ()
    _dense: DenseLayout | None = None

    @property
    def dense(self) -> DenseLayout:
        """How to pad the row for dense attention; worked out once for all layers."""
        if self._dense is None:
            self._dense = dense_layout(self.lengths, self.positions.device)
        return self._dense


def packing(lengths: list[int], device: torch.device) -> Packing:
    """The packing of sequences of these lengths, in order."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(sizes, 0)
    positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - sizes, sizes)
    cu_seqlens = F.pad(ends, (1, 0)).to(device, torch.int32)
    return Packing(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=positions.to(device),
        lengths=tuple(lengths),
    )


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """A packed row as a few padded batches of similar lengths.

    buckets: per bucket [sequences, padded length] int64, the token at each place (a padded place repeats token 0);
    restore: [tokens] int64, where each token lies in the concatenation of the flattened buckets.
    """

    buckets: tuple[Tensor, ...]
    restore: Tensor


def dense_layout(lengths: tuple[int, ...], device: torch.device) -> DenseLayout:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    members: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        members.setdefault(_padded(length), []).append(sequence)
    buckets, restore, offset = [], torch.empty(starts[-1], dtype=torch.int64), 0
    for padded, sequences in sorted(members.items()):
        padded = min(padded, max(lengths[sequence] for sequence in sequences))
        first = torch.tensor([starts[sequence] for sequence in sequences])[:, None]
        size = torch.tensor([lengths[sequence] for sequence in sequences])[:, None]
        place = torch.arange(padded)[None, :]
        inside, token = place < size, first + place
        restore[token[inside]] = torch.arange(offset, offset + inside.numel()).view_as(inside)[inside]
        buckets.append(torch.where(inside, token, 0).to(device))
        offset += inside.numel()
    return DenseLayout(tuple(buckets), restore.to(device))


def _padded(length: int) -> int:
    if length <= 4 * BUCKET:
        return -(-length // BUCKET) * BUCKET
    return 1 << (length - 1).bit_length()


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each packed sequence. query [t, 1, heads, d], key and value [t, 1, kv heads, d]."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packing | None = None,
    ) -> Tensor:
        """Attention output [t, 1, heads * d]. Without packing (tests) the row is one sequence."""
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if packed_seq_params is None:
            packed_seq_params = packing([q.shape[0]], q.device)
        if q.is_cuda and q.dtype != torch.float32:
            out = _varlen(q, k, v, packed_seq_params, self.scale)
        else:
            out = _dense(q, k, v, packed_seq_params.dense, self.scale)
        return out.reshape(out.shape[0], 1, -1)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float) -> Tensor:
    """FlashAttention over packed sequences; half precision on CUDA only. [t, heads, d]."""
    options: dict[str, Any] = {"enable_gqa": True} if _VARLEN_HAS_GQA else {}
    if not _VARLEN_HAS_GQA and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    longest, starts = packed.max_seqlen_q, packed.cu_seqlens_q
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0), **options)
    assert isinstance(out, Tensor)
    return out


def _dense(q: Tensor, k: Tensor, v: Tensor, layout: DenseLayout, scale: float) -> Tensor:
    """Padded causal attention, bucket by bucket. [t, heads, d].

    Padding is at the right, where causal attention does not look, so no mask is needed; padded rows are dropped.
    """
    outputs = []
    for tokens in layout.buckets:
        flat = tokens.flatten()
        qs, ks, vs = (x.index_select(0, flat).view(*tokens.shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            qs, ks, vs, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.restore)


class PackedRotary(torch.nn.Module):
    """Takes the place of GPTModel's rotary embedding: angles by each token's position in its own sequence."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        super().__init__()
        # Not a buffer: bf16 conversion of the model must not touch it.
        self.inverse = rope.inverse_frequencies(head_dim).to(device)

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: TransformerConfig,
        packed_seq_params: Packing | None = None,
    ) -> Tensor:
        """What Megatron hands back to `forward`: here the positions of the tokens, [t]."""
        if packed_seq_params is None:
            raise ValueError("the model must be called with packed_seq_params")
        return packed_seq_params.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """Angles [t, 1, 1, head_dim] float32."""
        angles = positions.float()[:, None] * self.inverse
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose weight's gradient is all-reduced over tensor parallel ranks under sequence parallelism.

    Megatron's `WrappedTorchNorm` refuses sequence parallelism. `finalize_model_grads` looks for the mark on the weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - Megatron's mark, unknown to torch


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The decoder of this pipeline stage: Megatron's local layer with our attention and norm."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)
