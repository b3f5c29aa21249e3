"""Attention of packed sequences on a GPU: FlashAttention 4 where it is installed, else the
FlashAttention 2 that torch ships.

FlashAttention 4 (the package `flash-attn-4`, extra `flash`) has kernels for Hopper and Blackwell
that know packed rows and grouped queries, so neither padding nor repeated keys are needed. They are
compiled when a machine first needs them, in seconds, and kept in a directory that
`FLASH_ATTENTION_CUTE_DSL_CACHE_DIR` names (`kernelCache` of a job; else one under /tmp).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from sluice.telemetry import logs
from sluice_trainer.model import deterministic

_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 has no grouped queries here, 2.13 has."""
_WIDTHS = (64, 128)
"""Channels of a head for which its kernels were measured (benchmarks/attention.py)."""
_ARCHITECTURES = (9, 10)
OLDEST = Version("4.0.0b36")
"""The release that was measured and tested. SGLang 0.5.17 brings an older one along."""
_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"

Flash4 = Callable[..., tuple[Tensor, Tensor | None]]


def flash4_fits(width: int) -> bool:
    """True where heads of so many channels go through FlashAttention 4. Not in deterministic mode,
    whose backward pass is torch's.
    """
    return width in _WIDTHS and not deterministic.enabled() and _flash4() is not None


def attend4(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, *, scale: float | None = None
) -> Tensor:
    """Causal attention within each sequence by FlashAttention 4: [t, heads, d].

    q: [t, heads, d]; k, v: [t, kv heads, d]. starts: [sequences + 1] int32, where the sequences
    begin; longest: tokens of the longest one. Only where `flash4_fits`.
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
    """Causal attention within each sequence by torch's FlashAttention 2, which repeats itself where
    torch is told to: [t, heads, d].

    q: [t, heads, d]; k, v: [m, kv heads, d]. starts: [sequences + 1] int32 each, where queries and
    keys of the sequences begin; longest: how many the longest one has. Query i of n is aligned with
    key m - n + i. window: keys that a query sees, its own included; None: all before it.
    """
    options: dict[str, Any] = {"enable_gqa": True} if _VARLEN_HAS_GQA else {}
    if not _VARLEN_HAS_GQA and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sides = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, *starts, *longest, scale=scale, window_size=sides, **options)
    assert isinstance(out, Tensor)
    return out


@cache
def _flash4() -> Flash4 | None:
    """Its function of packed rows. None without the package, or a GPU that it has kernels for."""
    if not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability()[0] not in _ARCHITECTURES:
        return None
    return loaded()


def loaded() -> Flash4 | None:
    """The package's function; None, and why in the log, where it is installed and is too old or
    does not load.
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
