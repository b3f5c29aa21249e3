"""Causal attention of the last queries of a sequence, by kernels for squares and rectangles.

With context parallelism a rank's queries begin in the middle of a sequence. All of them see the
keys before the first query: a rectangle. To the remaining keys they are causal: a square. Each part
yields an output and the logarithm of its softmax denominator, and the joint ones follow from them,
as in ring attention (Liu et al. 2023, arXiv:2310.01889). Given the joint ones, the backward pass of
each part yields its share of the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return the attention output [1, heads, n, d].

    Parameters
    ----------
    query
        [1, heads, n, d].
    key, value
        [1, kv heads, m, d], n < m. Query i sees keys 0 to m - n + i.
    scale
        Softmax scale.

    """
    out: Tensor = _RectangleAndSquare.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return out


class _RectangleAndSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        parts = _parts(query, key, value)
        outputs, sums, states = zip(*(_forward(*part, scale) for part in parts), strict=True)
        # The joint softmax weighs each part by its share of the joint denominator.
        total = torch.logaddexp(*sums)
        shares = [(part_sum - total).exp().view(*query.shape[:3], 1) for part_sum in sums]
        out: Tensor = (outputs[0] * shares[0] + outputs[1] * shares[1]).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.states, ctx.scale = states, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, total = ctx.saved_tensors
        gradients = [
            _backward(grad, *part, out, total, state, ctx.scale)
            for part, state in zip(_parts(query, key, value), ctx.states, strict=True)
        ]
        queries, keys, values = zip(*gradients, strict=True)
        return queries[0] + queries[1], torch.cat(keys, 2), torch.cat(values, 2), None


def _parts(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor, Tensor, bool]]:
    """Return rectangle and square: query, key, value, and True if it is causal."""
    sizes = [key.shape[2] - query.shape[2], query.shape[2]]
    halves = zip(
        torch.split(key, sizes, 2), torch.split(value, sizes, 2), (False, True), strict=True
    )
    return [(query, *half) for half in halves]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Any]:
    """Return the output, the log-denominators [.., heads, n], and state for the backward pass."""
    if query.is_cuda:
        out, sums, *state, _ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        return out, sums, state
    key, value = (_repeated(x, query) for x in (key, value))
    out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return out, sums, None


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    out: Tensor,
    sums: Tensor,
    state: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        starts_q, starts_k, longest_q, longest_k, seed, offset = state
        gradients: tuple[Tensor, Tensor, Tensor] = (
            _aten._scaled_dot_product_cudnn_attention_backward(
                grad,
                query,
                key,
                value,
                out,
                sums,
                seed,
                offset,
                None,
                starts_q,
                starts_k,
                longest_q,
                longest_k,
                0.0,
                causal,
                scale=scale,
            )
        )
        return gradients
    repeated = [_repeated(x, query) for x in (key, value)]
    queries, *others = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, *repeated, out, sums, 0.0, causal, scale=scale
    )
    keys, values = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in others)
    return queries, keys, values


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values for each query head: the CPU kernel has no grouped queries."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)
