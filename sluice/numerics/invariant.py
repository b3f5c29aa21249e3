"""Functions of a dense model whose bits for a token do not depend on the rest of the batch.

An engine computes a token alone, with other requests' tokens, or as part of a prompt; a trainer
computes whole sequences. Libraries choose another kernel for each of these sizes, which sums in
another order. Here one kernel with one tile size serves all of them: every sum over channels, the
vocabulary or earlier tokens is taken in the same order for every token (He et al., "Defeating
Nondeterminism in LLM Inference", Thinking Machines 2025). If trainer and engine both call these
functions on equal weights, their log-probs are equal to the bit, given the same GPU and releases of
torch and Triton.

This file runs in engines' images too, so it imports torch and Triton only.
"""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import invariant_kernels as kernels

_LOG2_E = 1.4426950408889634
# Tile of a matrix product.
_ROWS, _COLUMNS, _DEPTH = 128, 128, 64
# Tile of attention: rows of queries (of all heads that share keys), and keys.
_QUERIES, _KEYS = 64, 64
# Logits that are read at a time.
_WORDS = 4096


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x [..., k] times weight [n, k], plus bias [n]: [..., n], as x or `out_dtype`."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty((len(rows), len(weight)), dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        grid = (triton.cdiv(len(rows), _ROWS), triton.cdiv(len(weight), _COLUMNS))
        kernels.product[grid](
            rows,
            weight,
            bias,
            out,
            len(rows),
            len(weight),
            x.shape[-1],
            rows.stride(0),
            weight.stride(0),
            out.stride(0),
            HAS_BIAS=bias is not None,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            num_warps=8,
            num_stages=3,
        )
    return out.view(*x.shape[:-1], len(weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x [..., n] by its root mean square and multiply by weight [n], in float32.

    The result has x's type.
    """
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(width)
        kernels.norm[(len(rows),)](
            rows, weight, out, rows.stride(0), width, eps, WIDTH=block, num_warps=4
        )
    return out.view(x.shape)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    starts: Tensor,
    lengths: Tensor,
    key_lengths: Tensor,
    rows: Tensor,
    table: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """Causal attention of each sequence's last tokens to the whole sequence: [t, heads, d].

    Parameters
    ----------
    q
        [t, heads, d], the queries of sequence s from `starts[s]` on. d is at most 256.
    k, v
        [slots, kv heads, d]. Token i of sequence s is in slot `table[rows[s], i]`.
    starts, lengths
        First query and number of queries of each sequence.
    key_lengths
        Number of tokens of each sequence.
    rows, table
        Row of each sequence in the table of slots.
    longest
        Largest of `lengths`.
    scale
        Factor of the products of queries and keys.

    """
    heads, shared, width = q.shape[1], k.shape[1], q.shape[2]
    q, k, v = (x if x.stride()[1:] == (width, 1) else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = heads // shared
    # CUDA's other two dimensions end at 65,535, which a sequence of 1M tokens exceeds.
    grid = (triton.cdiv(longest * group, _QUERIES), shared, len(starts))
    kernels.attention[grid](
        q,
        k,
        v,
        out,
        starts,
        lengths,
        key_lengths,
        rows,
        table,
        scale * _LOG2_E,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        table.stride(0),
        GROUP=group,
        WIDTH=width,
        BLOCK=max(triton.next_power_of_2(width), 16),
        QUERIES=_QUERIES,
        KEYS=_KEYS,
        num_warps=4,
        num_stages=2,
    )
    return out


def softmax_statistics(
    logits: Tensor, place: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return softmax statistics of z = logits [n, words] x scales [n]: four tensors [n], float32.

    They are the largest z, the sum of exp(z - largest), the sum of that times (z - largest), and z
    at `place` [n].
    """
    count, words = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    results = [torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(4)]
    if count:
        kernels.softmax_statistics[(count,)](
            logits, place, scales, *results, words, logits.stride(0), WORDS=_WORDS, num_warps=8
        )
    largest, total, mean, target = results
    return largest, total, mean, target


def log_probs(logits: Tensor, tokens: Tensor, scales: Tensor) -> Tensor:
    """Return log-probs [n] of `tokens` [n] under softmax(logits [n, words] x scales [n])."""
    largest, total, _, target = softmax_statistics(logits, tokens, scales)
    return target - largest - total.log()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Apply rotary positions to the first channels of x [t, heads, d], in float32.

    cos and sin are [t, rotated channels / 2].
    """
    dim = 2 * cos.shape[-1]
    channels = x[..., :dim].float()
    a, b = (channels[..., 0::2], channels[..., 1::2]) if interleaved else channels.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    pairs = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., dim:]), dim=-1)


def silu_and_multiply(x: Tensor) -> Tensor:
    """Multiply the SiLU of the first half of the channels by the second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
