"""How far student and teacher are apart over a vocabulary that is spread over tensor-parallel
ranks.

Both models' logits of a chunk of tokens exist at a time, and no third tensor of that size is kept
for the gradient.
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
    """[3, n]: `divergence_shares` of this rank's words. totals: logarithms of the softmax's
    denominators, [n] each.
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
    of: Tensor,
    scale: float,
    kind: WholeVocabulary,
    beta: float,
) -> Tensor:
    """Gradient of the student's logits, in their precision. of: gradient of the
    divergences, [n].
    """
    log_q, log_p = (
        student.float() * scale - totals[0][:, None],
        teacher.float() * scale - totals[1][:, None],
    )
    result = divergence_gradient(log_q, log_p, score, kind, beta) * (of * scale)[:, None]
    return result.to(student.dtype)


class _Divergence(torch.autograd.Function):
    """Student's and teacher's logits, [n, local words] -> divergences, and reverse KL without
    gradient, [n] each.
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
        student, teacher, of_student, of_teacher, score = ctx.saved_tensors
        gradient = _gradient(
            student, teacher, (of_student, of_teacher), score, gradients[0], *ctx.options
        )
        return gradient, None, None, None, None, None


def _over_ranks(log_total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The logarithm of the sum of exp over all ranks' words, of this one's."""
    if group is None:
        return log_total
    highest = log_total.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    total = (log_total - highest).exp()
    dist.all_reduce(total, group=group)
    return highest + total.log()


_apply: Callable[..., tuple[Tensor, Tensor]] = _Divergence.apply


@dataclass(frozen=True, slots=True)
class TeacherDivergence:
    """A teacher with which a training forward pass compares the student.

    head: the teacher's last layer, hidden states [n, h] -> logits [n, local words] of its own
    vocabulary.
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
        """Divergences, with gradient, and reverse KL, [n] each.

        student: [n, local words], without padding; columns: of each rank, with it; hidden: [n, h],
        the teacher's at the same places. Words that only the teacher has are left out: it is
        compared as if it did not know them.
        """
        start = 0
        with torch.no_grad():
            teacher = self.head(hidden)
            if group is not None and teacher.shape[-1] != columns:
                teacher, start = _gathered(teacher, group), columns * group.rank()
            teacher = teacher[:, start : start + student.shape[-1]]
        return _apply(student, teacher, scale, self.kind, self.beta, group)


def _gathered(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The words of all ranks, [n, words]: where a larger vocabulary is cut at other places than the
    student's.
    """
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
