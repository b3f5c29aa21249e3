"""On-policy distillation from a teacher.

The teacher scores each token that the student sampled, which becomes an advantage, or all words of
the vocabulary at each position, which becomes a loss.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.api.groups.distillation import WholeVocabulary


def reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Estimate the reverse KL at each token: log pi_student - log pi_teacher; 0 if masked.

    Its mean over tokens that the student sampled estimates KL(student || teacher) (MiniLLM, Gu et
    al. 2023; GKD, Agarwal et al. 2023). All [tokens]; masked values (tool output) may be infinite.
    """
    return torch.where(mask, log_probs - teacher_log_probs, 0.0)


def distilled_advantages(advantages: Tensor, divergence: Tensor, coef: float) -> Tensor:
    """Compute A - coef * (log pi_old - log pi_teacher), slime's `--use-opd`, for any estimator.

    With A = 0 and coef 1 it is Thinking Machines' "On-Policy Distillation": each token is judged
    alone (discount 0), and the gradient of the policy loss is that of the reverse KL at the states
    that the student visits.

    Parameters
    ----------
    advantages
        [tokens], A.
    divergence
        [tokens], `reverse_kl` under the weights at the start of the batch.
    coef
        Weight of the divergence.

    Returns
    -------
    [tokens], without gradient.

    """
    return advantages - coef * divergence.detach()


class DivergenceShares(NamedTuple):
    """Sums over some words at n positions, [n] each; the sums over all words are what counts.

    Attributes
    ----------
    divergence
        The divergence to minimise.
    score
        Sum of q g, where d divergence / d z = q (g - sum of q g) for the student's logits z and
        some g of each word.
    reverse_kl
        KL(student || teacher).

    """

    divergence: Tensor
    score: Tensor
    reverse_kl: Tensor


def divergence_shares(
    student: Tensor, teacher: Tensor, kind: WholeVocabulary, beta: float
) -> DivergenceShares:
    """Compute the share of some words in the divergence of student q and teacher p.

    reverse_kl: sum of q (log q - log p), which seeks modes (MiniLLM, Gu et al. 2023). forward_kl:
    sum of p (log p - log q), which covers them. jsd: beta KL(p || m) + (1 - beta) KL(q || m), m =
    beta p + (1 - beta) q (GKD, Agarwal et al. 2023, eq. 1; verl `jensen_shannon_divergence`); near
    beta 0 it acts as forward_kl, near 1 as reverse_kl.

    Parameters
    ----------
    student, teacher
        [n, words], log-probs.
    kind
        Which divergence.
    beta
        Weight of the teacher in the mixture of jsd.

    """
    q = student.exp()
    reverse = (q * (student - teacher)).sum(-1)
    match kind:
        case "reverse_kl":
            return DivergenceShares(reverse, reverse, reverse)
        case "forward_kl":
            return DivergenceShares(
                (teacher.exp() * (teacher - student)).sum(-1), torch.zeros_like(reverse), reverse
            )
        case "jsd":
            mixture = _mixture(student, teacher, beta)
            away = (1 - beta) * (q * (student - mixture)).sum(-1)
            return DivergenceShares(
                beta * (teacher.exp() * (teacher - mixture)).sum(-1) + away, away, reverse
            )


def divergence_gradient(
    student: Tensor, teacher: Tensor, score: Tensor, kind: WholeVocabulary, beta: float
) -> Tensor:
    """Compute the gradient of the divergence by the student's logits.

    reverse_kl: q (log q - log p - KL(q || p)); forward_kl: q - p; jsd: (1 - beta) q (log q - log m
    - KL(q || m)).

    Parameters
    ----------
    student, teacher
        [n, words], log-probs.
    score
        [n], `DivergenceShares.score` of all words.
    kind
        Which divergence.
    beta
        Weight of the teacher in the mixture of jsd.

    Returns
    -------
    [n, words].

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
    """Compute log(beta p + (1 - beta) q), [n, words]."""
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
