"""Attention over packed sequences, through Megatron's layer spec.

A micro-batch is one row of tokens, several sequences end to end. Megatron's own packed path wants
TransformerEngine for the attention and rotates one sequence after another in Python. Here the row
goes through Megatron as an ordinary batch of one; `Packing` travels beside it and tells
`PackedAttention` where sequences begin: how far each token's queries and keys are turned, and who
sees whom.

Under context parallelism each rank holds two of 2 x size equal pieces of the row, one from its
front and the mirrored one from its back, so that all ranks have about the same number of keys to
look at. Queries stay where they are; keys and values of the whole row are gathered, layer by layer,
and freed after it (recomputed with `recompute: full`): each rank holds [row, 2 x kv heads x
head_dim] once a layer, everything else of the row only in its share.
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

GRAIN = 512
"""cuDNN plans attention anew for each length, for 80 ms: long sequences are padded to multiples of
this."""


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each packed sequence.

    query [t, 1, heads, d], key [t, 1, kv heads, d], value [t, 1, kv heads, dv], where t is this
    rank's share of the row. Latent attention gives them without the batch dimension.
    """

    def __init__(
        self, config: TransformerConfig, *_: Any, rotary: Rotary | None = None, **__: Any
    ) -> None:
        """rotary: how queries and keys are turned first; None: they are already (latent
        attention). norms: of queries and keys, before that.
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
        """Attention output [t, 1, heads * dv]. Without packing (tests) the row is one sequence."""
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
        """Queries or keys [t, heads, d], normalised where the model does that, and turned."""
        exact = self.config.deterministic_mode
        whole = not interleaved and norm_rotary.fits(x, 2 * cos_sin[0].shape[-1])
        if COMPILED and whole and not exact:
            weight, epsilon = (norm.weight, norm.epsilon) if norm else (None, 0.0)
            return norm_rotary.norm_and_rotate(x, weight, epsilon, *cos_sin)
        x = norm.normalised(x) if norm else x
        result: Tensor = (deterministic.functions().turn if exact else rotate)(
            x, *cos_sin, interleaved
        )
        return result


def _gather_row(k: Tensor, v: Tensor, restore: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole row, in its order, in one collective; gradients are summed back
    to their owners.
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
    """As the engine computes it, to the bit; the gradient is FlashAttention's. [t, heads, d]."""
    whole = packed.paged

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = deterministic.functions().attend(
            q,
            k,
            v,
            starts=whole.starts,
            lengths=whole.lengths,
            key_lengths=whole.lengths,
            rows=whole.rows,
            table=whole.table,
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
    """Half precision on CUDA: FlashAttention 4 over a whole row. Without it, and for a share of a
    row, cuDNN for long sequences and FlashAttention 2 over what is packed. [t, heads, dv].
    """
    width = v.shape[-1]
    if width != q.shape[-1]:
        v = F.pad(
            v, (0, q.shape[-1] - width)
        )  # one head size for all: latent attention has wider keys
    if packed.restore is None and flash_attention.flash4_fits(q.shape[-1]):
        whole = packed.varlen
        return flash_attention.attend4(q, k, v, whole.starts, whole.longest, scale=scale)[
            ..., :width
        ]
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
    """Causal attention of the last queries of one sequence, or of all of them, to it by cuDNN.
    [len(q), heads, dv].

    Queries and keys are padded at the right, where nobody looks, and queries at the left, to where
    a rectangle of keys that all of them see has a length that cuDNN has planned before.
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
    """Padded causal attention, bucket by bucket. [t, heads, dv].

    Padding is at the right, where causal attention does not look, so no mask is needed; padded rows
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
    """Attention of a share of the row to all of it, one sequence of each span at a time. [t, heads,
    dv].
    """
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
