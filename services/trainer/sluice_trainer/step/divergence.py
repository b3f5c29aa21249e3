"""The divergence of student and teacher over a vocabulary split over tensor-parallel ranks.

Only the logits of a chunk of tokens exist at a time, for both models, and no third tensor of that
size is kept for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sluice.api.groups.distillation import WholeVocabulary
from sluice_trainer.algorithms.distillation import divergence_gradient, divergence_shares
from sluice_trainer.kernels.compiled import compiled


@dataclass(frozen=True, slots=True)
class TeacherDivergence:
    """A teacher that a training forward pass compares its student with.

    Attributes
    ----------
    head
        The teacher's output layer: hidden states [n, h] -> logits [n, local words] of the teacher's
        vocabulary.
    kind
        Which divergence.
    beta
        Weight of the teacher in the mixture of `jsd`.

    """

    head: Callable[[Tensor], Tensor]
    kind: WholeVocabulary
    beta: float

    def __call__(
        self,
        student: Tensor,
        hidden: Tensor,
        *,
        columns: int,
        scale: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """Compare the logits of a student with those of the teacher.

        Words that only the teacher knows are left out.

        Parameters
        ----------
        student
            [n, local words], the student's logits without padding.
        hidden
            [n, h], the teacher's hidden states at the same positions.
        columns
            Words of each rank, with padding.
        scale
            Factor of the logits: 1 / temperature.
        group
            Tensor-parallel ranks; None: the vocabulary is not split.

        Returns
        -------
        Divergences, with gradient, and reverse KL, [n] each.

        """
        start = 0
        with torch.no_grad():
            teacher = self.head(hidden)
            # A larger vocabulary is split at other words: take the words of this rank from all.
            if group is not None and teacher.shape[-1] != columns:
                teacher, start = _all_words(teacher, group), columns * group.rank()
            teacher = teacher[:, start : start + student.shape[-1]]
        return _apply(student, teacher, scale, self.kind, self.beta, group)


def _all_words(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the words of all ranks, [n, words].

    Needed if the teacher's vocabulary is larger and therefore split at other words.
    """
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


@compiled
def _normalizer(logits: Tensor, scale: float) -> Tensor:
    return torch.logsumexp(logits.float() * scale, -1)


@compiled
def _shares(
    student: Tensor,
    teacher: Tensor,
    totals: tuple[Tensor, Tensor],
    scale: float,
    kind: WholeVocabulary,
    beta: float,
) -> Tensor:
    """Return [3, n], the `divergence_shares` of this rank's words.

    `totals` are the logarithms of the softmax denominators, [n] each.
    """
    log_q, log_p = (
        student.float() * scale - totals[0][:, None],
        teacher.float() * scale - totals[1][:, None],
    )
    return torch.stack(divergence_shares(log_q, log_p, kind, beta))


@compiled
def _gradient(
    student: Tensor,
    teacher: Tensor,
    totals: tuple[Tensor, Tensor],
    score: Tensor,
    grad_divergence: Tensor,
    scale: float,
    kind: WholeVocabulary,
    beta: float,
) -> Tensor:
    """Return the gradient of the student's logits, in their precision."""
    log_q, log_p = (
        student.float() * scale - totals[0][:, None],
        teacher.float() * scale - totals[1][:, None],
    )
    result = divergence_gradient(log_q, log_p, score, kind, beta)
    return (result * (grad_divergence * scale)[:, None]).to(student.dtype)


class _Divergence(torch.autograd.Function):
    """Autograd function: logits [n, local words] of student and teacher -> divergences [n].

    Also returns the reverse KL, [n], without gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        scale: float,
        kind: WholeVocabulary,
        beta: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        totals = (
            _over_ranks(_normalizer(student, scale), group),
            _over_ranks(_normalizer(teacher, scale), group),
        )
        shares = _shares(student, teacher, totals, scale, kind, beta)
        if group is not None:
            dist.all_reduce(shares, group=group)
        divergence, score, reverse = shares
        ctx.save_for_backward(student, teacher, *totals, score)
        ctx.options = scale, kind, beta
        ctx.mark_non_differentiable(reverse)
        return divergence, reverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        student, teacher, student_total, teacher_total, score = ctx.saved_tensors
        totals = (student_total, teacher_total)
        gradient = _gradient(student, teacher, totals, score, gradients[0], *ctx.options)
        return gradient, None, None, None, None, None


def _over_ranks(log_total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the logarithm of the sum of exp over the words of all ranks, from this rank's."""
    if group is None:
        return log_total
    # Subtract the largest before exp, so that it does not overflow.
    highest = log_total.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    total = (log_total - highest).exp()
    dist.all_reduce(total, group=group)
    return highest + total.log()


_apply: Callable[..., tuple[Tensor, Tensor]] = _Divergence.apply
