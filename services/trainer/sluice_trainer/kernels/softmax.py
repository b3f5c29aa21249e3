"""Gradient of logits with respect to log-probs and entropies, in one pass over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice_trainer.kernels import in_triton

# Logits per program.
WORDS = 4096


def gradient(
    logits: Tensor,
    place: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    at_target: Tensor,
    gradients: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Return the gradient of the logits, [n, words] in the logits' precision.

    Parameters are named as in `sluice_trainer.step.logits`.

    Parameters
    ----------
    logits
        [n, words].
    place, log_total, entropy, at_target
        [n] each.
    gradients
        Gradients of log-probs and of entropies, [n] each.
    scale
        Inverse temperature.

    """
    count, words = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    out = torch.empty((count, words), dtype=logits.dtype, device=logits.device)
    if count:
        in_triton().softmax_gradient[(count, -(-words // WORDS))](
            *(logits, place, log_total, entropy, at_target),
            *(grad.contiguous() for grad in gradients),
            *(out, words, logits.stride(0), scale),
            WORDS=WORDS,
            num_warps=8,
        )
    return out
