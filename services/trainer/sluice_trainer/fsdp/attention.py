"""Attention of transformers' models over packed sequences.

A model uses an implementation that keeps packed sequences apart. On GPUs without the flash-attn
package that is torch's own FlashAttention (`sluice_packed`), which neither computes scores between
sequences nor needs a mask of [tokens, tokens]. Ranks that share rows compute it too, on CPUs as
well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.fsdp.row_share import RowShare
from sluice_trainer.kernels import flash_attention
from sluice_trainer.model.unsupported import UnsupportedModelError

PACKED_ATTENTION = "sluice_packed"


def attention(
    kind: type[Any], config: Any, dtype: torch.dtype, *, shares_rows: bool = False
) -> str:
    """Return the name of transformers' attention implementation to use.

    It keeps packed sequences apart. If the family's attention is more than a softmax (sinks of
    gpt-oss, capped scores of Gemma 2), only `eager` is correct in all releases.

    Parameters
    ----------
    kind
        Class of the model.
    config
        Configuration of its text model.
    dtype
        Precision of computation.
    shares_rows
        Whether ranks share the tokens of a row.

    Raises
    ------
    UnsupportedModelError
        The family's attention cannot be computed by ranks that share rows.

    """
    softmax_only = kind._supports_sdpa and not getattr(config, "attn_logit_softcapping", None)
    if shares_rows:
        if not (softmax_only and kind._supports_attention_backend):
            raise UnsupportedModelError(
                f"ranks cannot share the attention of model_type {config.model_type!r}: leave "
                "trainer.parallelism.context out, or choose backend: megatron"
            )
        return PACKED_ATTENTION
    if not softmax_only:
        return "eager"
    if DEVICE.type == "cuda" and dtype != torch.float32:
        if kind._supports_flash_attn and is_flash_attn_2_available():
            return "flash_attention_2"
        if kind._supports_attention_backend:
            return PACKED_ATTENTION
    return "sdpa"


def tower_attention(decoder: str) -> str:
    """Return the implementation for a vision tower, from that of its decoder.

    transformers gives FlashAttention the bounds of all images at once, and calls any other one
    image by image; those of `PACKED_ATTENTION` are a decoder's.
    """
    return "sdpa" if decoder == PACKED_ATTENTION else decoder


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
    row_share: RowShare | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, as transformers calls it.

    Parameters
    ----------
    module
        The calling layer; unused.
    query, key, value
        [1, heads, t, d], [1, kv heads, t, d] and [1, kv heads, t, dv].
    attention_mask
        Unused: the bounds of the sequences replace it.
    scaling
        Softmax scale.
    sliding_window
        Number of keys that a query sees, including its own; None: all up to its own.
    cu_seq_lens_q
        [sequences + 1] int32, starts of the sequences and the end of the last one.
    max_length_q
        Tokens of the longest sequence.
    row_share
        This rank's position among those that share the row; None: it has all tokens. The bounds are
        those of the whole row.

    Returns
    -------
    The output [1, t, heads, dv], and None instead of attention weights.

    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    width = v.shape[-1]
    if width != q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # latent attention has wider keys than values
    if row_share is not None:
        q, k, v = row_share.whole_row(q, k, v)
    out = flash_attention.attend2(
        q,
        k,
        v,
        (cu_seq_lens_q, cu_seq_lens_q),
        (max_length_q, max_length_q),
        scale=scaling,
        # Passed even if no sequence is longer: FlashAttention drops such a window itself, while a
        # comparison here would be a guard, and each result another compilation of every layer.
        window=sliding_window,
    )
    if row_share is not None:
        out = row_share.all_heads(out)
    return out[None, ..., :width], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
