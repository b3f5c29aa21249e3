"""Attention over packed sequences, through Megatron's layer spec.

A micro-batch is one row of tokens: several concatenated sequences. Megatron's own packed path needs
TransformerEngine for attention and rotates the sequences one by one in Python. Here the row passes
through Megatron as an ordinary batch of one, together with its `Packing`, which tells
`PackedAttention` the bounds of the sequences: they determine the rotary positions and which keys a
query sees.

With context parallelism each rank holds two of 2 x size equal pieces of the row, one from its front
and the mirrored one from its back, so that all ranks see about the same number of keys. Queries
stay on their rank. Keys and values of the whole row are gathered layer by layer and freed
afterwards (recomputed with `recompute: full`): each rank holds [row, 2 x kv heads x head_dim] for
one layer at a time, and everything else only for its share of the row.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from sluice_trainer.kernels import flash_attention, norm_rotary
from sluice_trainer.kernels.compiled import COMPILED
from sluice_trainer.megatron.model import rectangular_attention
from sluice_trainer.megatron.model.layout import DenseLayout, Packing, packing
from sluice_trainer.megatron.model.norms import HeadNorm
from sluice_trainer.megatron.model.rotary import Rotary, rotate
from sluice_trainer.model import deterministic

# cuDNN plans attention again for each length, which takes 80 ms: long sequences are padded to
# multiples of this.
GRAIN = 512


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each packed sequence.

    query [t, 1, heads, d], key [t, 1, kv heads, d], value [t, 1, kv heads, dv]; t is this rank's
    share of the row. Latent attention omits the batch dimension.
    """

    def __init__(
        self, config: TransformerConfig, *_: Any, rotary: Rotary | None = None, **__: Any
    ) -> None:
        """Create the attention of a layer.

        rotary: rotation of queries and keys; None if they are rotated already (latent attention).
        `norms` of queries and keys, applied before the rotation, are set later by
        `join_head_norms`.
        """
        super().__init__(config=config)
        self.rotary = rotary
        self.norms: tuple[HeadNorm | None, HeadNorm | None] = (None, None)
        self.scale = config.softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
        """Return the output [t, 1, heads * dv].

        Without packing (in tests) the row is one sequence.
        """
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        packed = packed_seq_params or packing([q.shape[0]], q.device)
        if self.rotary:
            q, k = (
                self._rotated(x, norm, packed.cos_sin(self.rotary), self.rotary.interleaved)
                for x, norm in zip((q, k), self.norms, strict=True)
            )
        if self.config.deterministic_mode:
            return _deterministic_attention(q, k, v, packed, self.scale).reshape(q.shape[0], 1, -1)
        if packed.restore is not None:
            k, v = _gather_row(k, v, packed.restore)
        if q.is_cuda and q.dtype != torch.float32:
            out = _half_on_gpu(q, k, v, packed, self.scale)
        elif packed.restore is None:
            out = _padded_attention(q, k, v, packed.dense, self.scale)
        else:
            out = _attend_by_span(q, k, v, packed, self.scale)
        return out.reshape(out.shape[0], 1, -1)

    def _rotated(
        self, x: Tensor, norm: HeadNorm | None, cos_sin: tuple[Tensor, Tensor], interleaved: bool
    ) -> Tensor:
        """Return queries or keys [t, heads, d], normalised if the model does that, and rotated."""
        deterministic_mode = self.config.deterministic_mode
        fused = not interleaved and norm_rotary.fits(x, 2 * cos_sin[0].shape[-1])
        if COMPILED and fused and not deterministic_mode:
            weight, epsilon = (norm.weight, norm.epsilon) if norm else (None, 0.0)
            return norm_rotary.norm_and_rotate(x, weight, epsilon, *cos_sin)
        x = norm.normalised(x) if norm else x
        function = deterministic.functions().rotate if deterministic_mode else rotate
        result: Tensor = function(x, *cos_sin, interleaved)
        return result


def _gather_row(k: Tensor, v: Tensor, restore: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values of the whole row, in order, in one collective.

    Their gradients are summed back to their owners.
    """
    both = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
    row = gather_from_sequence_parallel_region(
        both, group=parallel_state.get_context_parallel_group()
    )
    row = row.index_select(0, restore)
    keys, values = row.split([k[0].numel(), v[0].numel()], dim=1)
    return keys.reshape(-1, *k.shape[1:]), values.reshape(-1, *v.shape[1:])


def _deterministic_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float
) -> Tensor:
    """Compute exactly the engine's result; the gradient is FlashAttention's. [t, heads, d]."""
    paged = packed.paged

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = deterministic.functions().attention(
            q,
            k,
            v,
            starts=paged.starts,
            lengths=paged.lengths,
            key_lengths=paged.lengths,
            rows=paged.rows,
            table=paged.table,
            longest=max(packed.lengths),
            scale=scale,
        )
        return out

    def usual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for span in packed.spans:
            qs, ks, vs = (x[slice(*span.queries)] for x in (q, k, v))
            outputs.append(
                flash_attention.attend2(qs, ks, vs, span.starts, span.longest, scale=scale)
            )
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    return deterministic.attention(q, k, v, exact=exact, usual=usual)


def _half_on_gpu(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float) -> Tensor:
    """Compute attention in half precision on CUDA: [t, heads, dv].

    FlashAttention 4 computes a whole row. Without it, and for a share of a row, cuDNN computes long
    sequences, and FlashAttention 2 the packed ones.
    """
    width = v.shape[-1]
    if width != q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # latent attention has wider keys than values
    if packed.restore is None and flash_attention.flash4_fits(q.shape[-1]):
        bounds = packed.varlen
        out = flash_attention.attend4(q, k, v, bounds.starts, bounds.longest, scale=scale)
        return out[..., :width]
    fits = q.shape[-1] <= 128 and torch.cuda.get_device_capability() >= (9, 0)
    outputs = []
    for span in packed.spans:
        pieces = q[slice(*span.queries)], k[slice(*span.keys)], v[slice(*span.keys)]
        outputs.append(
            _cudnn_attention(*pieces, scale)
            if fits and span.long
            else flash_attention.attend2(*pieces, span.starts, span.longest, scale=scale)
        )
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[..., :width]


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last queries of one sequence, or of all, by cuDNN.

    [len(q), heads, dv]. Queries and keys are padded at the right, which no query sees. Queries are
    also padded at the left, so that the rectangle of keys that all of them see has a length that
    cuDNN has planned before.
    """
    before = (len(k) - len(q)) // GRAIN * GRAIN
    lead, fill = len(k) - len(q) - before, -len(k) % GRAIN
    padded = F.pad(q, (0, 0, 0, 0, lead, fill)), *(F.pad(x, (0, 0, 0, 0, 0, fill)) for x in (k, v))
    query, key, value = (x.transpose(0, 1)[None] for x in padded)
    if before:
        out = rectangular_attention.attend(query, key, value, scale)
    else:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
    return out[0].transpose(0, 1)[lead : lead + len(q)]


def _padded_attention(q: Tensor, k: Tensor, v: Tensor, layout: DenseLayout, scale: float) -> Tensor:
    """Causal attention over padded buckets of sequences: [t, heads, dv].

    Padding is at the right, which causal attention does not see, so no mask is needed; padded rows
    are dropped.
    """
    outputs = []
    for tokens in layout.buckets:
        flat = tokens.flatten()
        qs, ks, vs = (
            x.index_select(0, flat).view(*tokens.shape, *x.shape[1:]).transpose(1, 2)
            for x in (q, k, v)
        )
        out = F.scaled_dot_product_attention(
            qs, ks, vs, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.restore)


def _attend_by_span(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float) -> Tensor:
    """Attention of a share of the row to the whole row, one sequence at a time: [t, heads, dv]."""
    outputs = []
    for span in packed.spans:
        qs, ks, vs = q[slice(*span.queries)], k[slice(*span.keys)], v[slice(*span.keys)]
        bounds = (pairwise(starts.tolist()) for starts in span.starts)
        for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
            query, key, value = (x.transpose(0, 1)[None] for x in (qs[q0:q1], ks[k0:k1], vs[k0:k1]))
            mask, grouped = causal_lower_right(q1 - q0, k1 - k0), q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
            )
            outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
