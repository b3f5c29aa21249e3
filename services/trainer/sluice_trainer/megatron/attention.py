"""Attention over packed sequences, through Megatron's layer spec.

A micro-batch is one row of tokens, several sequences end to end. Megatron's own packed path wants TransformerEngine for
the attention and rotates one sequence after another in Python. Here the row goes through Megatron as an ordinary batch
of one; `Packing` travels beside it and tells the two places that look across tokens where sequences begin:
`PackedRotary` (positions) and `PackedAttention` (who sees whom).

Under context parallelism each rank holds two of 2 x size equal pieces of the row, one from its front and the mirrored
one from its back, so that all ranks have about the same number of keys to look at. Queries stay where they are; keys
and values of the whole row are gathered, layer by layer, and freed after it (recomputed with `recompute: full`): each
rank holds [row, 2 x kv heads x head_dim] once a layer, everything else of the row only in its share.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from sluice_trainer.megatron.rope import Rope

_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 has no grouped queries here, 2.13 has."""

BUCKET = 16
"""Sequences are padded to multiples of this, and to powers of two above four times it, when attention is dense."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a row is spread: over `context` ranks, of which this is number `rank`; each share over `tensor` ranks."""

    tensor: int = 1
    context: int = 1
    rank: int = 0

    @property
    def multiple(self) -> int:
        """What the length of a row must be a multiple of."""
        return self.tensor if self.context == 1 else 2 * self.context * self.tensor

    def spans(self, length: int) -> list[tuple[int, int]]:
        """The pieces of a row of this length that this rank holds, in order: [start, end) each."""
        if self.context == 1:
            return [(0, length)]
        pieces, size = 2 * self.context, length // (2 * self.context)
        return [(piece * size, (piece + 1) * size) for piece in (self.rank, pieces - 1 - self.rank)]

    def local(self, length: int) -> Tensor:
        """[share] int64: which tokens of the row this rank holds."""
        return torch.cat([torch.arange(start, end) for start, end in self.spans(length)])


@dataclass(frozen=True, slots=True)
class Span:
    """A run of queries and the keys that they may see. Sizes are per sequence that has queries in it.

    queries, keys: [start, end) of them, among this rank's queries and in the whole row; starts_q, starts_k:
    [sequences + 1] int32, within those; longest_q, longest_k: the longest. Query i of n is aligned with key m - n + i.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Where sequences lie in a row of tokens.

    positions: [share] int64, of this rank's tokens, each within its sequence; lengths: of the sequences in the whole
    row. spans: this rank's queries. restore: [row] int64, where each token of the row lies among all ranks' shares;
    None: this rank has the whole row. qkv_format stays "sbhd": Megatron treats the row as one ordinary sequence.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    lengths: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    restore: Tensor | None = None
    _dense: DenseLayout | None = None

    @property
    def dense(self) -> DenseLayout:
        """How to pad the row for dense attention; worked out once for all layers."""
        if self._dense is None:
            self._dense = dense_layout(self.lengths, self.positions.device)
        return self._dense


def packing(lengths: list[int], device: torch.device, split: Split | None = None) -> Packing:
    """The packing of sequences of these lengths, in order. Their sum is a multiple of `split.multiple`."""
    split = split or Split()
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(sizes, 0)
    row = int(ends[-1])
    positions = torch.arange(row) - torch.repeat_interleave(ends - sizes, sizes)
    restore = None
    if split.context > 1:
        shares = [Split(split.tensor, split.context, rank).local(row) for rank in range(split.context)]
        restore = torch.argsort(torch.cat(shares)).to(device)
        positions = positions[shares[split.rank]]
    offset, spans = 0, []
    for start, end in split.spans(row):
        spans.append(_span(lengths, start, end, offset, device))
        offset += end - start
    return Packing(
        qkv_format="sbhd", positions=positions.to(device), lengths=tuple(lengths), spans=tuple(spans), restore=restore
    )


def _span(lengths: list[int], start: int, end: int, offset: int, device: torch.device) -> Span:
    """The queries [start, end) of the row, which lie at `offset` among this rank's."""
    queries, keys, first, begin = [], [], None, 0
    for length in lengths:
        low, high = max(begin, start), min(begin + length, end)
        if low < high:
            first = begin if first is None else first
            queries.append(high - low)
            keys.append(high - begin)
        begin += length
    assert first is not None

    def starts(sizes: list[int]) -> Tensor:
        return F.pad(torch.cumsum(torch.tensor(sizes), 0), (1, 0)).to(device, torch.int32)

    return Span((offset, offset + end - start), (first, end), starts(queries), starts(keys), max(queries), max(keys))


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
    """Causal attention within each packed sequence.

    query [t, 1, heads, d], key [t, 1, kv heads, d], value [t, 1, kv heads, dv], where t is this rank's share of the
    row. Latent attention gives them without the batch dimension.
    """

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
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
        if packed.restore is not None:
            k, v = _gather_row(k, v, packed.restore)
        if q.is_cuda and q.dtype != torch.float32:
            out = _varlen(q, k, v, packed, self.scale)
        elif packed.restore is None:
            out = _dense(q, k, v, packed.dense, self.scale)
        else:
            out = _span_by_span(q, k, v, packed, self.scale)
        return out.reshape(out.shape[0], 1, -1)


def _gather_row(k: Tensor, v: Tensor, restore: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole row, in its order, in one collective; gradients are summed back to their owners."""
    both = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
    row = gather_from_sequence_parallel_region(both, group=parallel_state.get_context_parallel_group())
    row = row.index_select(0, restore)
    keys, values = row.split([k[0].numel(), v[0].numel()], dim=1)
    return keys.reshape(-1, *k.shape[1:]), values.reshape(-1, *v.shape[1:])


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float) -> Tensor:
    """FlashAttention over packed sequences; half precision on CUDA only. [t, heads, dv]."""
    width = v.shape[-1]
    if width != q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # one head size for all: latent attention has wider keys
    options: dict[str, Any] = {"enable_gqa": True} if _VARLEN_HAS_GQA else {}
    if not _VARLEN_HAS_GQA and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outputs = []
    for span in packed.spans:
        out = varlen_attn(
            q[slice(*span.queries)],
            k[slice(*span.keys)],
            v[slice(*span.keys)],
            span.starts_q,
            span.starts_k,
            span.longest_q,
            span.longest_k,
            scale=scale,
            window_size=(-1, 0),
            **options,
        )
        assert isinstance(out, Tensor)
        outputs.append(out)
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[..., :width]


def _dense(q: Tensor, k: Tensor, v: Tensor, layout: DenseLayout, scale: float) -> Tensor:
    """Padded causal attention, bucket by bucket. [t, heads, dv].

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


def _span_by_span(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float) -> Tensor:
    """Attention of a share of the row to all of it, one sequence of each span at a time. [t, heads, dv]."""
    outputs = []
    for span in packed.spans:
        qs, ks, vs = q[slice(*span.queries)], k[slice(*span.keys)], v[slice(*span.keys)]
        for (q0, q1), (k0, k1) in zip(pairwise(span.starts_q.tolist()), pairwise(span.starts_k.tolist()), strict=True):
            query, key, value = (x.transpose(0, 1)[None] for x in (qs[q0:q1], ks[k0:k1], vs[k0:k1]))
            mask, grouped = causal_lower_right(q1 - q0, k1 - k0), q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
            outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


class PackedRotary(torch.nn.Module):
    """Takes the place of a rotary embedding of Megatron's: angles by each token's position in its own sequence.

    interleaved: neighbouring channels turn together (GLM-4). squeezed: without the batch dimension, as latent attention
    has its packed queries.
    """

    def __init__(
        self, rope: Rope, dim: int, device: torch.device, *, interleaved: bool = False, squeezed: bool = False
    ) -> None:
        super().__init__()
        # Not a buffer: bf16 conversion of the model must not touch it.
        self.inverse = rope.inverse_frequencies(dim).to(device)
        self.interleaved = interleaved
        self.squeezed = squeezed

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
        """Angles [t, 1, 1, dim] float32; squeezed: [t, 1, dim]."""
        angles = positions.float()[:, None] * self.inverse
        both = torch.stack((angles, angles), dim=-1).flatten(1) if self.interleaved else torch.cat((angles, angles), -1)
        return both[:, None, :] if self.squeezed else both[:, None, None, :]
