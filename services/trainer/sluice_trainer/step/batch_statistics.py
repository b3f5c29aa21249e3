"""A survey of the whole optimizer step, over all ranks, for losses that must know of it beforehand.

Each function takes this rank's micro-batches with the current log-probs of their tokens
and gives back the micro-batches with the answer. All are collective. Sums are of all data-parallel
ranks, so no answer depends on which rank or micro-batch a token lies in.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sluice.api import Algorithm, RLJobSpec
from sluice.api.groups.losses import Covariance
from sluice_trainer.algorithms.covariance import (
    Identity,
    Keys,
    as_mask,
    between,
    covariances,
    lots,
    places,
    share,
    smallest,
)
from sluice_trainer.algorithms.objective import (
    LossInputs,
    correction_of,
    distilled,
    train_and_old_log_probs,
)
from sluice_trainer.algorithms.policy_loss import clipped_surrogate, weight_sums
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.step.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """number: in its batch, from 0; of_run: in the run. shard: this rank's sequences."""

    number: int
    of_run: int
    shard: Seq[TrainSequence]


def survey(
    batches: list[MicroBatch],
    step: OptimizerStep,
    spec: RLJobSpec,
    ranks: Ranks,
    score: Callable[[list[MicroBatch]], list[Tensor]],
) -> list[MicroBatch]:
    """With what a loss that looks at the whole optimizer step must know. Without such a loss, as
    they are.

    score: log-probs of each micro-batch's tokens under the current weights, [r] each: one more
    pass, without gradients. In a batch's first optimizer step these are the old ones, if there are
    any.
    """
    algorithm, several = spec.algorithm, spec.trainer.steps_per_batch > 1
    if not algorithm.by_covariance and not algorithm.off_policy.normalize:
        return batches
    known = several and (step.number == 0 or not algorithm.by_covariance)
    log_probs = [_old(inputs) for _, inputs in _with_inputs(batches)] if known else score(batches)
    if algorithm.off_policy.normalize:
        batches = with_mean_weight(batches, log_probs, algorithm, ranks)
    if algorithm.by_covariance:
        batches = with_covariance_mask(batches, log_probs, step, algorithm, ranks, spec.data.seed)
        if step.number == 0:
            # The ratio is then exactly 1: the gradient of kl_cov's penalty would be the sign of
            # what rounding leaves.
            batches = [
                replace(b, loss=replace(inputs, old_log_probs=None))
                for b, inputs in _with_inputs(batches)
            ]
    return batches


def _old(inputs: LossInputs) -> Tensor:
    assert inputs.old_log_probs is not None, (
        "several optimizer steps have log-probs of the weights before them"
    )
    return inputs.old_log_probs


def with_mean_weight(
    batches: Seq[MicroBatch], log_probs: Seq[Tensor], algorithm: Algorithm, ranks: Ranks
) -> list[MicroBatch]:
    """With the mean of the off-policy weights. log_probs: of each micro-batch, [r]."""
    off_policy = algorithm.off_policy
    weighted = []
    for inputs, current in _tokens(batches, log_probs):
        train_log_probs, _ = train_and_old_log_probs(current, inputs, algorithm)
        weight = correction_of(train_log_probs, inputs, off_policy).weight
        weighted.append(weight_sums(weight, off_policy.level, inputs.mask, inputs.sequence))
    sums = _over_ranks(
        ranks, weight=[total for total, _ in weighted], count=[count for _, count in weighted]
    )
    mean = sums["weight"] / max(sums["count"], 1)
    return [
        replace(batch, loss=replace(inputs, mean_weight=mean))
        for batch, inputs in _with_inputs(batches)
    ]


def with_covariance_mask(
    batches: Seq[MicroBatch],
    log_probs: Seq[Tensor],
    step: OptimizerStep,
    algorithm: Algorithm,
    ranks: Ranks,
    seed: int,
) -> list[MicroBatch]:
    """With the tokens that the loss picks by covariance. log_probs: of each micro-batch, [r]. seed:
    of lots.
    """
    whole = [
        _standing(inputs, current, algorithm) for inputs, current in _tokens(batches, log_probs)
    ]
    current, advantages, mask, clipped = (
        torch.cat(parts).cpu() for parts in zip(*whole, strict=True)
    )
    kept = mask.double()
    sums = _over_ranks(
        ranks,
        count=[kept.sum()],
        log_prob=[(current * kept).sum()],
        advantage=[(advantages * kept).sum()],
    )
    count = max(sums["count"], 1)
    covariance = covariances(
        current, advantages, sums["log_prob"] / count, sums["advantage"] / count
    )
    identity = np.concatenate([_identity(batch, step.shard) for batch in batches])
    chosen = algorithm.loss.covariance or Covariance()
    if algorithm.policy_loss == "clip_cov":
        mask = mask & between(covariance, clipped, chosen.lower, chosen.upper)
        keys = lots(seed, step.of_run, identity)
    else:
        keys = -covariance.numpy()
    (candidates,) = np.nonzero(mask.numpy())
    count = share(int(sums["count"]), chosen.ratio)
    taken = _chosen(keys[candidates], identity[candidates], count, ranks)
    covariance_mask = torch.split(
        as_mask(candidates[taken], len(mask)),
        [len(inputs.mask) for _, inputs in _with_inputs(batches)],
    )
    return [
        replace(batch, loss=replace(inputs, covariance_mask=part.to(inputs.mask.device)))
        for (batch, inputs), part in zip(_with_inputs(batches), covariance_mask, strict=True)
    ]


def _standing(
    inputs: LossInputs, current: Tensor, algorithm: Algorithm
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each token: its log-prob, its advantage, whether it is trained, whether PPO's clip holds
    it.
    """
    _, old_log_probs = train_and_old_log_probs(current, inputs, algorithm)
    inputs, _ = distilled(inputs, old_log_probs, algorithm)
    clip, ratio = algorithm.loss.clip, torch.exp(current - old_log_probs)
    held = clipped_surrogate(ratio, inputs.advantages, low=clip.low, high=clip.highest).clipped
    # A masked token's numbers mean nothing, and 0 x inf in a sum is nan.
    return (
        torch.where(inputs.mask, current, 0.0).double(),
        inputs.advantages.double(),
        inputs.mask,
        held > 0,
    )


def _chosen(keys: Keys, identity: Identity, count: int, ranks: Ranks) -> Identity:
    """Places of this rank's tokens among the `count` smallest keys of all ranks.

    Each rank names its own smallest; ranks that share a model name the same ones, and count once.
    """
    smallest_here = smallest(keys, identity, count)
    named = dict(
        ranks.gather((ranks.data_parallel_rank, (keys[smallest_here], identity[smallest_here])))
    )
    owners = np.concatenate([np.full(len(named[rank][0]), rank) for rank in sorted(named)])
    places = np.concatenate([np.arange(len(named[rank][0])) for rank in sorted(named)])
    all_keys, all_identities = (
        np.concatenate([named[rank][part] for rank in sorted(named)]) for part in (0, 1)
    )
    best = smallest(all_keys, all_identities, count)
    mine: Identity = smallest_here[places[best[owners[best] == ranks.data_parallel_rank]]]
    return mine


def _identity(batch: MicroBatch, shard: Seq[TrainSequence]) -> Identity:
    members = zip((shard[i] for i in batch.members), batch.response_lengths, strict=True)
    rows = [
        np.stack(np.broadcast_arrays(one.group_id, one.index, places(one.branch, length)), axis=1)
        for one, length in members
    ]
    return np.concatenate([np.empty((0, 3), np.int64), *rows]).astype(np.int64)


def _with_inputs(batches: Seq[MicroBatch]) -> list[tuple[MicroBatch, LossInputs]]:
    return [(batch, batch.loss) for batch in batches if batch.loss is not None]


def _tokens(batches: Seq[MicroBatch], log_probs: Seq[Tensor]) -> list[tuple[LossInputs, Tensor]]:
    return [
        (inputs, current.to(inputs.mask.device))
        for (_, inputs), current in zip(_with_inputs(batches), log_probs, strict=True)
    ]


def _over_ranks(ranks: Ranks, **sums: list[Tensor]) -> dict[str, float]:
    """Sums of all data-parallel ranks, added up in the same order on every rank."""
    local = {name: float(torch.stack(parts).double().sum()) for name, parts in sums.items()}
    of_rank = dict(ranks.gather((ranks.data_parallel_rank, local)))
    return {name: sum(of_rank[rank][name] for rank in sorted(of_rank)) for name in local}
