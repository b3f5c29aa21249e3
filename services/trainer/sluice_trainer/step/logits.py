"""Log-probs and entropies out of logits, whose words may be spread over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sluice_trainer.kernels import softmax
from sluice_trainer.kernels.compiled import COMPILED
from sluice_trainer.model import deterministic


def _statistics(
    logits: Tensor, place: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of z = logits x scale: [n] float32 each.

    Largest z, sum of exp(z - largest), sum of that times (z - largest), z at `place`. On a GPU they
    are the engine's in `trainer.deterministic` mode, to the bit.
    """
    if COMPILED:
        scales = torch.full((len(logits),), scale, dtype=torch.float32, device=logits.device)
        fast: tuple[Tensor, Tensor, Tensor, Tensor] = deterministic.functions().statistics(
            logits, place, scales
        )
        return fast
    z = logits.float() * scale
    largest = z.amax(-1)
    shifted = z - largest[:, None]
    exponentials = shifted.exp()
    target = z.gather(-1, place[:, None]).squeeze(-1)
    return largest, exponentials.sum(-1), (exponentials * shifted).sum(-1), target


def _gradient(
    logits: Tensor,
    place: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    at_target: Tensor,
    of: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Gradient of the logits, [n, local vocab], in their precision; see `_LogProbEntropy`.

    at_target: gradient of the log-probs where this rank has the target, else 0. of: [n] each, of
    log-probs and entropies.
    """
    if COMPILED:
        return softmax.gradient(logits, place, log_total, entropy, at_target, of, scale)
    log_p = logits.float() * scale - log_total[:, None]
    result = -log_p.exp() * (of[0][:, None] + (log_p + entropy[:, None]) * of[1][:, None])
    columns = torch.arange(logits.shape[-1], device=logits.device)
    result = result + torch.where(columns == place[:, None], at_target[:, None], 0.0)
    return (result * scale).to(logits.dtype)


class _LogProbEntropy(torch.autograd.Function):
    """Log-prob of a target and entropy of a softmax, its vocabulary spread over ranks of a group.

    logits [n, local vocab], targets [n] global ids -> log-probs [n], entropies [n], float32.
    With p the softmax of z: d logp / d z = 1[target] - p; d H / d z = -p (log p + H). The logits
    are all that is kept, and all that is read, of [n, vocab]: passes over them cost more here than
    arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        start: int,
        scale: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        here = (targets >= start) & (targets < start + logits.shape[-1])
        place = torch.where(here, targets - start, 0)
        largest, total, mean, target = _statistics(logits, place, scale)
        if group is not None:
            largest, total, mean = _over_ranks(largest, total, mean, group)
            target = _all_reduce(torch.where(here, target, 0.0), dist.ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - mean / total
        ctx.save_for_backward(logits, place, here, largest + log_total, entropy)
        ctx.scale = scale
        return target - largest - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, place, here, log_total, entropy = ctx.saved_tensors
        of = gradients[0], gradients[1]
        result = _gradient(logits, place, log_total, entropy, of[0] * here, of, ctx.scale)
        return result, None, None, None, None


def _over_ranks(
    largest: Tensor, total: Tensor, mean: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of all ranks' shares of the vocabulary, from those of this one's."""
    highest = _all_reduce(largest.clone(), dist.ReduceOp.MAX, group)
    down = largest - highest
    both = torch.stack((total, mean + down * total)) * down.exp()
    total, mean = _all_reduce(both, dist.ReduceOp.SUM, group)
    return highest, total, mean


def _all_reduce(
    values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op, group=group)
    return values


_apply: Callable[..., tuple[Tensor, Tensor]] = _LogProbEntropy.apply


def log_probs_and_entropies(
    logits: Tensor,
    targets: Tensor,
    *,
    scale: float,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Of softmax(logits x scale): each [n] float32.

    logits: [n, words], from word `start` on; the others are on the other ranks of `group`.
    targets: [n] int64, of the whole vocabulary.
    """
    return _apply(logits, targets, start, scale, group)


def energies(
    logits: Tensor,
    targets: Tensor,
    *,
    scale: float,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor]:
    """1 - 2 p(target) + sum of p^2 over the vocabulary, p = softmax(logits x scale): [n] float32.

    The squared norm of the gradient of the target's log-prob by the logits ("logit-gradient proxy",
    arXiv:2602.07078; verl's `sum_pi_squared`). Without gradients. Arguments as above.
    """
    z = logits.detach().float() * scale
    largest = _all_reduce(z.amax(-1), dist.ReduceOp.MAX, group)
    exponentials = (z - largest[:, None]).exp()
    here = (targets >= start) & (targets < start + z.shape[-1])
    place = torch.where(here, targets - start, 0)
    target = torch.where(here, exponentials.gather(-1, place[:, None]).squeeze(-1), 0.0)
    sums = torch.stack((exponentials.sum(-1), exponentials.square().sum(-1), target))
    total, squares, target = _all_reduce(sums, dist.ReduceOp.SUM, group)
    return (1 - 2 * target / total + squares / total.square(),)


class TokenNumbers(Protocol):
    """Numbers of each target by the logits that predict it: `log_probs_and_entropies`,
    `energies`.
    """

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        scale: float,
        start: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, ...]: ...
