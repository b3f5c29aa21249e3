"""The gradient of logits by their log-probs and entropies, in one pass over them."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice_trainer.kernels import in_triton

WORDS = 4096
"""Logits that a program computes."""


def gradient(
    logits: Tensor,
    place: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    at_target: Tensor,
    of: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """[n, words], in the logits' precision. Arguments as `sluice_trainer.step.logits` has them:
    [n] each, of: by log-probs and by entropies.
    """
    count, words = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    out = torch.empty((count, words), dtype=logits.dtype, device=logits.device)
    if count:
        in_triton().softmax_gradient[(count, -(-words // WORDS))](
            *(logits, place, log_total, entropy, at_target, of[0].contiguous(), of[1].contiguous()),
            *(out, words, logits.stride(0), scale),
            WORDS=WORDS,
            num_warps=8,
        )
    return out
