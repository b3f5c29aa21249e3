"""Attention over packed sequences on a GPU, as transformers' models call it.

torch's own FlashAttention, for GPUs without the flash-attn package: nothing looks at what lies
between two sequences, and no mask of [tokens, tokens] exists.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.kernels import flash_attention

PACKED_ATTENTION = "sluice_packed"


def attention(kind: type[Any], config: Any, dtype: torch.dtype) -> str:
    """Transformers' name of the attention to use: one that keeps packed sequences apart.

    kind: the model's class. Where softmax alone does not describe it (gpt-oss' sinks, Gemma 2's
    capped scores) the eager one is the only one that all releases compute right.
    """
    softmax_only = kind._supports_sdpa and not getattr(config, "attn_logit_softcapping", None)
    if not softmax_only:
        return "eager"
    if DEVICE.type == "cuda" and dtype != torch.float32:
        if kind._supports_flash_attn and is_flash_attn_2_available():
            return "flash_attention_2"
        if kind._supports_attention_backend:
            return PACKED_ATTENTION
    return "sdpa"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: [1, t, heads, dv].

    query [1, heads, t, d], key [1, kv heads, t, d], value [1, kv heads, t, dv]. sliding_window:
    keys that a query sees, its own included. cu_seq_lens_q: [sequences + 1] int32.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    width = v.shape[-1]
    if width != q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # one head size for all: latent attention
    out = flash_attention.attend2(
        q,
        k,
        v,
        (cu_seq_lens_q, cu_seq_lens_q),
        (max_length_q, max_length_q),
        scale=scaling,
        # Also when no sequence is longer: FlashAttention drops such a window by itself, while a
        # comparison here would be a guard, and each answer another compilation of every layer.
        window=sliding_window,
    )
    return out[None, ..., :width], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
