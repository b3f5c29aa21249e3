"""Attention of packed sequences on a GPU: FlashAttention 4 where it is installed, else the
FlashAttention 2 that torch ships.

FlashAttention 4 (the package `flash-attn-4`) has kernels for Hopper and Blackwell that know packed
rows and grouped queries, so neither padding nor repeated keys are needed. They are compiled when a
process first needs them, and kept in `FLASH_ATTENTION_CUTE_DSL_CACHE_DIR`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from sluice_trainer import exactness

_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 has no grouped queries here, 2.13 has."""
WIDEST = 128
"""Channels of a head, for which its kernels are both fast and tested."""


def flash4_fits(width: int) -> bool:
    """Whether heads of so many channels go through FlashAttention 4. Not in deterministic mode,
    whose backward pass is torch's.
    """
    return width <= WIDEST and width % 8 == 0 and not exactness.enabled() and _flash4() is not None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each sequence: [t, heads, d].

    q: [t, heads, d]; k, v: [m, kv heads, d]. starts: [sequences + 1] int32 each, where queries and
    keys of the sequences begin; longest: how many the longest one has. Query i of n is aligned with
    key m - n + i. window: keys that a query sees, its own included; None: all before it.
    """
    if flash4_fits(q.shape[-1]):
        return _attend4(q, k, v, starts, longest, scale, window)
    return attend2(q, k, v, starts, longest, scale=scale, window=window)


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
    """`attend` by torch's FlashAttention 2, which repeats itself where torch is told to."""
    options: dict[str, Any] = {"enable_gqa": True} if _VARLEN_HAS_GQA else {}
    if not _VARLEN_HAS_GQA and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sides = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, *starts, *longest, scale=scale, window_size=sides, **options)
    assert isinstance(out, Tensor)
    return out


def _attend4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    flash4 = _flash4()
    assert flash4 is not None
    out: Tensor = flash4(
        q,
        k,
        v,
        cu_seqlens_q=starts[0],
        cu_seqlens_k=starts[1],
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        softmax_scale=scale,
        causal=window is None,
        window_size=(None, None) if window is None else (window - 1, 0),
    )[0]
    return out


@cache
def _flash4() -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """Its function of packed rows; None without the package or a GPU that it has kernels for."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return None
    if not importlib.util.find_spec("flash_attn") or not importlib.util.find_spec(
        "flash_attn.cute"
    ):
        return None
    function: Callable[..., tuple[Tensor, Tensor | None]] = importlib.import_module(
        "flash_attn.cute"
    ).flash_attn_varlen_func
    return function
