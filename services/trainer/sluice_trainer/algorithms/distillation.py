"""On-policy distillation: a teacher's opinion of each token that the student wrote, as an
advantage; or of all words that might have stood in its place, as a loss.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.api.groups.distillation import WholeVocabulary


def reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Each token's estimate of the divergence: log pi_student - log pi_teacher; 0 where masked.

    Its mean over tokens that the student drew estimates KL(student || teacher) (MiniLLM, Gu et al.
    2023; GKD, Agarwal et al. 2023). All [tokens]; what stands at a masked token (tool output) may
    be anything.
    """
    return torch.where(mask, log_probs - teacher_log_probs, 0.0)


def distilled_advantages(advantages: Tensor, divergence: Tensor, coef: float) -> Tensor:
    """A - coef * (log pi_old - log pi_teacher): slime's `--use-opd`, beside whatever estimator.

    With A = 0 and coef 1 it is Thinking Machines' "On-Policy Distillation": each token answers for
    itself alone (discount 0), and the gradient of the policy loss is that of the reverse KL at the
    states that the student visits. advantages, divergence (`reverse_kl` under the weights at the
    start of the batch): [tokens]. No gradients.
    """
    return advantages - coef * divergence.detach()


class Shares(NamedTuple):
    """Of the words that are given, [n] each; the sums over all words are what counts.

    divergence: what is minimised; score: sum of q g, where d divergence / d z = q (g - sum of q g)
    for the student's logits z and some g of each word; reverse_kl: KL(student || teacher).
    """

    divergence: Tensor
    score: Tensor
    reverse_kl: Tensor


def divergence_shares(
    student: Tensor, teacher: Tensor, kind: WholeVocabulary, beta: float
) -> Shares:
    """The share of some words in the divergence of student q and teacher p at each of n places.

    reverse_kl: sum of q (log q - log p), which seeks modes (MiniLLM, Gu et al. 2023). forward_kl:
    sum of p (log p - log q), which covers them. jsd: beta KL(p || m) + (1 - beta) KL(q || m), m =
    beta p + (1 - beta) q (GKD, Agarwal et al. 2023, eq. 1; verl `jensen_shannon_divergence`); near
    beta 0 it acts as forward_kl, near 1 as reverse_kl. student, teacher: log-probs, [n, words].
    """
    q = student.exp()
    reverse = (q * (student - teacher)).sum(-1)
    match kind:
        case "reverse_kl":
            return Shares(reverse, reverse, reverse)
        case "forward_kl":
            return Shares(
                (teacher.exp() * (teacher - student)).sum(-1), torch.zeros_like(reverse), reverse
            )
        case "jsd":
            mixture = _mixture(student, teacher, beta)
            away = (1 - beta) * (q * (student - mixture)).sum(-1)
            return Shares(
                beta * (teacher.exp() * (teacher - mixture)).sum(-1) + away, away, reverse
            )


def divergence_gradient(
    student: Tensor, teacher: Tensor, score: Tensor, kind: WholeVocabulary, beta: float
) -> Tensor:
    """The gradient of the divergence by the student's logits, [n, words].

    reverse_kl: q (log q - log p - KL(q || p)); forward_kl: q - p; jsd: (1 - beta) q (log q - log m
    - KL(q || m)). student, teacher: log-probs, [n, words]; score: `Shares.score` of all words, [n].
    """
    q = student.exp()
    match kind:
        case "reverse_kl":
            return q * (student - teacher - score[:, None])
        case "forward_kl":
            return q - teacher.exp()
        case "jsd":
            return q * ((1 - beta) * (student - _mixture(student, teacher, beta)) - score[:, None])


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """log(beta p + (1 - beta) q). [n, words]"""
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
