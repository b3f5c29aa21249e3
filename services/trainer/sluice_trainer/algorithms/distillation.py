"""On-policy distillation: a teacher's opinion of each token that the student wrote, as an advantage."""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """What each token says of the divergence: log pi_student - log pi_teacher; 0 where masked.

    Its mean over tokens that the student drew estimates KL(student || teacher) (MiniLLM, Gu et al. 2023; GKD, Agarwal
    et al. 2023). All [tokens]; what stands at a masked token (tool output) may be anything.
    """
    return torch.where(mask, log_probs - teacher_log_probs, 0.0)


def distilled_advantages(advantages: Tensor, divergence: Tensor, coef: float) -> Tensor:
    """A - coef * (log pi_old - log pi_teacher): slime's `--use-opd`, beside whatever estimator.

    With A = 0 and coef 1 it is Thinking Machines' "On-Policy Distillation": each token answers for itself alone
    (discount 0), and the gradient of the policy loss is that of the reverse KL at the states that the student visits.
    advantages, divergence (`reverse_kl` under the weights at the start of the batch): [tokens]. No gradients.
    """
    return advantages - coef * divergence.detach()
