"""Attention over packed sequences on a GPU, by FlashAttention 4 or the FlashAttention 2 in torch.

FlashAttention 4 (the package `flash-attn-4`, extra `flash`) has kernels for Hopper and Blackwell
that support packed rows and grouped queries, so neither padding nor repeated keys are needed. They
are compiled in seconds when a machine first needs them, and cached in the directory that
`FLASH_ATTENTION_CUTE_DSL_CACHE_DIR` names (`kernelCache` of a job; otherwise one in /tmp).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from sluice.telemetry import logs
from sluice_trainer.model import deterministic

# torch 2.11 has no grouped queries here; 2.13 has.
_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
# Head sizes for which FlashAttention 4 was measured (benchmarks/attention.py).
_WIDTHS = (64, 128)
_ARCHITECTURES = (9, 10)
# The first release that was measured and tested. SGLang 0.5.17 depends on an older one.
OLDEST = Version("4.0.0b36")
_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"

Flash4 = Callable[..., tuple[Tensor, Tensor | None]]


def flash4_fits(width: int) -> bool:
    """Return True if FlashAttention 4 can be used for heads of `width` channels.

    Deterministic mode does not use it, because its backward pass must be torch's.
    """
    return width in _WIDTHS and not deterministic.enabled() and _flash4() is not None


def attend4(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, *, scale: float | None = None
) -> Tensor:
    """Causal attention within each sequence by FlashAttention 4, if `flash4_fits`: [t, heads, d].

    Parameters
    ----------
    q
        [t, heads, d].
    k, v
        [t, kv heads, d].
    starts
        [sequences + 1] int32, starts of the sequences and the end of the last one.
    longest
        Tokens of the longest sequence.
    scale
        Softmax scale; None: 1 / sqrt(d).

    """
    flash4 = _flash4()
    assert flash4 is not None
    return flash4(
        q,
        k,
        v,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
    )[0]


def attend2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each sequence by torch's FlashAttention 2: [t, heads, d].

    It is deterministic if torch is told to be. On a CPU and in float32, for which it has no kernel,
    each sequence is computed by itself, and queries and keys must be of the same tokens.

    Parameters
    ----------
    q
        [t, heads, d].
    k, v
        [m, kv heads, d].
    starts
        Starts of the sequences among queries and among keys, [sequences + 1] int32 each.
    longest
        Queries and keys of the longest sequence.
    scale
        Softmax scale; None: 1 / sqrt(d).
    window
        Number of keys that a query sees, including its own; None: all up to its own. Query i of n
        is aligned with key m - n + i.

    """
    if not q.is_cuda or q.dtype == torch.float32:
        return _attend_each(q, k, v, starts[0], scale, window)
    options: dict[str, Any] = {"enable_gqa": True} if _VARLEN_HAS_GQA else {}
    if not _VARLEN_HAS_GQA and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sides = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, *starts, *longest, scale=scale, window_size=sides, **options)
    assert isinstance(out, Tensor)
    return out


def _attend_each(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float | None, window: int | None
) -> Tensor:
    if len(q) != len(k):
        raise ValueError(f"{len(q)} queries and {len(k)} keys: only a GPU computes parts, in bf16")
    outputs = []
    for start, end in pairwise(starts.tolist()):
        query, key, value = (x[start:end].transpose(0, 1) for x in (q, k, v))
        mask = None  # without a window no mask of [tokens, tokens] is needed
        if window is not None:
            seen = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device)
            mask = seen.tril().triu(1 - window)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@cache
def _flash4() -> Flash4 | None:
    """Return FlashAttention 4's function for packed rows, or None if package or GPU do not fit."""
    if not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability()[0] not in _ARCHITECTURES:
        return None
    return loaded()


def loaded() -> Flash4 | None:
    """Import the package's function.

    None if it is not installed, or if it is too old or fails to load; then a log line says why.
    """
    try:
        release = Version(importlib.metadata.version("flash-attn-4"))
    except importlib.metadata.PackageNotFoundError:
        return None
    if release < OLDEST:
        logs.get().info(
            f"flash-attn-4 {release} is older than {OLDEST}, which is the first that was tested: "
            "attention is torch's and cuDNN's, which is slower"
        )
        return None
    os.environ.setdefault(_CACHE, "1")
    try:
        function: Flash4 = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        logs.get().warning(
            "flash-attn-4 is installed but cannot be loaded: attention is torch's and cuDNN's, "
            "which is slower",
            error=f"{type(error).__name__}: {error}",
        )
        return None
    return function
