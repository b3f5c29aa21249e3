"""Linear attention of Qwen3.5 and Qwen3-Next in plain torch, as SGLang calls its CPU kernels.

Gated DeltaNet (Yang et al. 2025, eq. 10): for each head and token a state S, [values, keys],
decays, forgets what it holds under the key, and takes the new value:

    S = exp(g) S;  S = S + beta (v - S k) k^T;  output = S q

States are in a pool with one slot for each request, and are changed in place.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_NORM_EPS = 1e-6


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor | None,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve each sequence of x, [channels, tokens], with the last tokens before it.

    weight: [channels, width]. conv_states: [slots, channels, width - 1].
    """
    parts = []
    starts, slots = query_start_loc.tolist(), cache_indices.tolist()
    for number, slot in enumerate(slots):
        tokens = x[:, starts[number] : starts[number + 1]]
        continues = has_initial_state is not None and bool(has_initial_state[number])
        before = conv_states[slot] if continues else torch.zeros_like(conv_states[slot])
        whole = torch.cat([before.to(x.dtype), tokens], 1)
        conv_states[slot] = whole[:, whole.shape[1] - before.shape[1] :]
        parts.append(_convolved(whole, weight, bias, activation))
    return torch.cat(parts, 1)


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve one token of each request: x is [requests, channels]."""
    whole = torch.cat([conv_states[conv_state_indices].to(x.dtype), x[..., None]], 2)
    conv_states[conv_state_indices] = whole[..., 1:].to(conv_states.dtype)
    return _convolved(whole, weight, bias, activation)[..., 0]


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    result = functional.conv1d(x, weight[:, None], bias, groups=len(weight))
    return functional.silu(result) if activation in ("silu", "swish") else result


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Return the outputs, [1, tokens, value heads, values].

    q, k: [1, tokens, heads, keys]; v: [1, tokens, value heads, values]; g, beta: [1, tokens, value
    heads]; initial_state: the pool, [slots, value heads, values, keys].
    """
    q, k = _scaled(q, k, v.shape[2], normalized=use_qk_l2norm_in_kernel)
    decay, beta, values = g[0].float().exp(), beta[0].float(), v[0].float()
    out = torch.empty_like(values)
    starts = cu_seqlens.tolist()
    for number, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for token in range(starts[number], starts[number + 1]):
            state = state * decay[token, :, None, None]
            change = (values[token] - _product(state, k[token])) * beta[token, :, None]
            state = state + change[..., None] * k[token, :, None]
            out[token] = _product(state, q[token])
        initial_state[slot] = state.to(initial_state.dtype)
    return out[None].to(v.dtype), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,  # noqa: N803 - SGLang's name
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> Tensor:
    """Return the outputs of one token of each request, from its gates before any activation."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )[0]


def fused_gdn_gating_cpu(
    A_log: Tensor,  # noqa: N803 - SGLang's name
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay, and beta, each [1, tokens, value heads] float32."""
    steps = functional.softplus(a.float() + dt_bias.float())
    return (-A_log.float().exp() * steps)[None], b.float().sigmoid()[None]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, heads: int, value_heads: int, keys: int, values: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split projections, [tokens, all q, all k, all v, all z] and [tokens, all b, all a]."""
    end = 2 * heads * keys + value_heads * values
    mixed, z = qkvz[:, :end], qkvz[:, end:]
    b, a = ba.chunk(2, -1)
    return (
        mixed.contiguous(),
        z.reshape(-1, value_heads, values),
        b.contiguous(),
        a.contiguous(),
    )


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    """Return normalized queries and keys, [tokens x heads, width] each."""
    return (
        _gemma_norm(q.reshape(-1, width), q_weight, eps),
        _gemma_norm(k.reshape(-1, width), k_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    width: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalized queries and keys, and gates, [tokens x heads, width] each.

    q_gate: [tokens, heads x (query and gate)].
    """
    q, gate = q_gate.reshape(-1, heads, 2 * width).chunk(2, -1)
    queries, keys = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, width)
    return queries, keys, gate.reshape(-1, width).contiguous()


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply x by the sigmoid of the gate, in place."""
    x.mul_(gate.reshape(x.shape).float().sigmoid().to(x.dtype))


def _gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm whose weight is an offset from 1."""
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * (1 + weight.float())).to(x.dtype)


def _scaled(q: Tensor, k: Tensor, heads: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Return queries, scaled, and keys, [tokens, value heads, keys] float32."""
    queries, keys = q[0].float(), k[0].float()
    if normalized:
        queries, keys = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS) for x in (queries, keys)
        )
    repeats = heads // q.shape[2]
    queries = queries * q.shape[-1] ** -0.5
    return queries.repeat_interleave(repeats, 1), keys.repeat_interleave(repeats, 1)


def _product(state: Tensor, vector: Tensor) -> Tensor:
    """[heads, values, keys] times [heads, keys]."""
    return (state @ vector[..., None])[..., 0]


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x times the SiLU of the gate."""
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * weight.float() * functional.silu(gate.float())).to(x.dtype)
