"""Log-probs and entropies of logits whose words may be split over tensor-parallel ranks."""

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
    """Return statistics of z = logits x scale over this rank's words, [n] float32 each.

    They are the largest z, the sum of exp(z - largest), the sum of exp(z - largest) x (z -
    largest), and z at `place`. On a GPU they equal the engine's in `trainer.deterministic` mode bit
    for bit.
    """
    if COMPILED:
        # The kernel takes a scale for each row, as in the engine.
        scales = torch.full((len(logits),), scale, dtype=torch.float32, device=logits.device)
        fast: tuple[Tensor, Tensor, Tensor, Tensor] = deterministic.functions().softmax_statistics(
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
    gradients: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Return the gradient of the logits, [n, local vocab], in their precision.

    `at_target` is the gradient of the log-probs if this rank has the target, else 0. `gradients`
    are those of log-probs and entropies, [n] each. For the formula see `_LogProbEntropy`.
    """
    if COMPILED:
        return softmax.gradient(logits, place, log_total, entropy, at_target, gradients, scale)
    log_p = logits.float() * scale - log_total[:, None]
    result = -log_p.exp() * (
        gradients[0][:, None] + (log_p + entropy[:, None]) * gradients[1][:, None]
    )
    columns = torch.arange(logits.shape[-1], device=logits.device)
    result = result + torch.where(columns == place[:, None], at_target[:, None], 0.0)
    return (result * scale).to(logits.dtype)


class _LogProbEntropy(torch.autograd.Function):
    """Autograd function: log-prob of a target and entropy of a softmax over a split vocabulary.

    Logits [n, local vocab] and targets [n], global ids, give log-probs [n] and entropies [n],
    float32. With p the softmax of z: d logp / d z = 1[target] - p; d H / d z = -p (log p + H). Of
    [n, vocab] only the logits are kept and read, because passes over memory cost more than
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
        is_local = (targets >= start) & (targets < start + logits.shape[-1])
        place = torch.where(is_local, targets - start, 0)
        largest, total, mean, target = _statistics(logits, place, scale)
        if group is not None:
            largest, total, mean = _over_ranks(largest, total, mean, group)
            # Only one rank has the target; the others add 0.
            target = _all_reduce(torch.where(is_local, target, 0.0), dist.ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - mean / total
        ctx.save_for_backward(logits, place, is_local, largest + log_total, entropy)
        ctx.scale = scale
        return target - largest - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, place, is_local, log_total, entropy = ctx.saved_tensors
        both = gradients[0], gradients[1]
        at_target = gradients[0] * is_local
        result = _gradient(logits, place, log_total, entropy, at_target, both, ctx.scale)
        return result, None, None, None, None


def _over_ranks(
    largest: Tensor, total: Tensor, mean: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the statistics of all ranks' shares of the vocabulary."""
    # Bring all shares to the same largest value before they are added.
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
    """Compute log-probs of targets and entropies of softmax(logits x scale).

    Parameters
    ----------
    logits
        [n, words], this rank's words, from word `start` on.
    targets
        [n] int64, ids in the whole vocabulary.
    scale
        1 / temperature.
    start
        First word of this rank.
    group
        Ranks that share the vocabulary; None: it is not split.

    Returns
    -------
    Log-probs and entropies, each [n] float32.

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
    """Compute 1 - 2 p(target) + sum of p^2 over the vocabulary, p = softmax(logits x scale).

    It is the squared norm of the gradient of the target's log-prob by the logits ("logit-gradient
    proxy", arXiv:2602.07078; verl's `sum_pi_squared`). For the parameters see
    `log_probs_and_entropies`.

    Returns
    -------
    [n] float32, without gradients.

    """
    z = logits.detach().float() * scale
    largest = _all_reduce(z.amax(-1), dist.ReduceOp.MAX, group)
    exponentials = (z - largest[:, None]).exp()
    is_local = (targets >= start) & (targets < start + z.shape[-1])
    place = torch.where(is_local, targets - start, 0)
    target = torch.where(is_local, exponentials.gather(-1, place[:, None]).squeeze(-1), 0.0)
    sums = torch.stack((exponentials.sum(-1), exponentials.square().sum(-1), target))
    total, squares, target = _all_reduce(sums, dist.ReduceOp.SUM, group)
    return (1 - 2 * target / total + squares / total.square(),)


class TokenNumbers(Protocol):
    """A function of logits and targets, such as `log_probs_and_entropies` or `energies`."""

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        scale: float,
        start: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, ...]: ...
