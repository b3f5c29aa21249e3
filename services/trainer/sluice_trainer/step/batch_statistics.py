"""Statistics over a whole optimizer step and all ranks, for losses that need them beforehand.

Each function takes this rank's micro-batches with the current log-probs of their tokens and returns
the micro-batches with the statistics. All are collective. Sums go over all data-parallel ranks, so
a result does not depend on the rank or micro-batch of a token.
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
    clip_cov_candidates,
    covariances,
    mask_at,
    random_keys,
    share_of,
    smallest_keys,
    token_positions,
)
from sluice_trainer.algorithms.objective import (
    LossInputs,
    importance_correction,
    train_and_old_log_probs,
    with_teacher_advantages,
)
from sluice_trainer.algorithms.policy_loss import clipped_surrogate, weight_sums
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.step.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """An optimizer step.

    Attributes
    ----------
    number
        Number in the batch, from 0.
    run_number
        Number in the run, from 0.
    shard
        Sequences of this rank.

    """

    number: int
    run_number: int
    shard: Seq[TrainSequence]


def with_step_statistics(
    batches: list[MicroBatch],
    step: OptimizerStep,
    spec: RLJobSpec,
    ranks: Ranks,
    score: Callable[[list[MicroBatch]], list[Tensor]],
) -> list[MicroBatch]:
    """Add the statistics that the loss needs; without such a loss return the batches as they are.

    Parameters
    ----------
    batches
        Micro-batches of this rank.
    step
        The optimizer step.
    spec
        Spec of the job.
    ranks
        All ranks.
    score
        Computes the log-probs of each micro-batch's tokens under the current weights, [r] each: one
        more forward pass. It is not called if the log-probs are known: in a batch's first optimizer
        step they are the old ones, if there are any.

    """
    algorithm, several = spec.algorithm, spec.trainer.steps_per_batch > 1
    if not algorithm.by_covariance and not algorithm.off_policy.normalize:
        return batches
    if several and (step.number == 0 or not algorithm.by_covariance):
        log_probs = [_old(inputs) for _, inputs in _with_inputs(batches)]
    else:
        log_probs = score(batches)
    if algorithm.off_policy.normalize:
        batches = with_mean_weight(batches, log_probs, algorithm, ranks)
    if algorithm.by_covariance:
        batches = with_covariance_mask(batches, log_probs, step, algorithm, ranks, spec.data.seed)
        if step.number == 0:
            # Make the ratio exactly 1: otherwise the gradient of kl_cov's penalty would be the sign
            # of rounding errors.
            batches = [
                replace(b, loss=replace(inputs, old_log_probs=None))
                for b, inputs in _with_inputs(batches)
            ]
    return batches


def reference_kl(mismatched: Seq[TrainSequence], log_probs: Seq[Tensor], ranks: Ranks) -> float:
    """Return kto's estimate of the KL from the reference, at least 0. Collective.

    It is the mean of log pi - log pi_ref over answers to other prompts (Ethayarajh et al. 2024,
    section 4.1). There is no gradient.

    Parameters
    ----------
    mismatched
        This rank's sequences of a prompt and the answer to another one.
    log_probs
        Current log-probs of each, [response].
    ranks
        All ranks.

    """
    ratios = []
    for sequence, current in zip(mismatched, log_probs, strict=True):
        assert sequence.ref_log_probs is not None
        trained = torch.from_numpy(sequence.loss_mask) > 0
        ratios.append((current - sequence.ref_log_probs)[trained].sum())
    none = torch.zeros(1)
    sums = _over_ranks(ranks, ratio=[*ratios, none[0]], count=[torch.tensor(float(len(ratios)))])
    return max(sums["ratio"] / max(sums["count"], 1.0), 0.0)


def _old(inputs: LossInputs) -> Tensor:
    assert inputs.old_log_probs is not None, (
        "several optimizer steps have log-probs of the weights before them"
    )
    return inputs.old_log_probs


def with_mean_weight(
    batches: Seq[MicroBatch], log_probs: Seq[Tensor], algorithm: Algorithm, ranks: Ranks
) -> list[MicroBatch]:
    """Add the mean of the off-policy weights; `log_probs` are those of each micro-batch, [r]."""
    off_policy = algorithm.off_policy
    weighted = []
    for inputs, current in _tokens(batches, log_probs):
        train_log_probs, _ = train_and_old_log_probs(current, inputs, algorithm)
        weight = importance_correction(train_log_probs, inputs, off_policy).weight
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
    """Add the mask of the tokens that the loss selects by covariance.

    Parameters
    ----------
    batches
        Micro-batches of this rank.
    log_probs
        Current log-probs of each micro-batch, [r].
    step
        The optimizer step.
    algorithm
        Settings.
    ranks
        All ranks.
    seed
        Seed of random choices.

    """
    tokens = [
        _token_facts(inputs, current, algorithm) for inputs, current in _tokens(batches, log_probs)
    ]
    current, advantages, mask, clipped = (
        torch.cat(parts).cpu() for parts in zip(*tokens, strict=True)
    )
    kept = mask.double()
    sums = _over_ranks(
        ranks,
        count=[kept.sum()],
        log_prob=[(current * kept).sum()],
        advantage=[(advantages * kept).sum()],
    )
    # The covariance is relative to the means over the whole step.
    count = max(sums["count"], 1)
    covariance = covariances(
        current, advantages, sums["log_prob"] / count, sums["advantage"] / count
    )
    identity = np.concatenate([_identity(batch, step.shard) for batch in batches])
    settings = algorithm.loss.covariance or Covariance()
    if algorithm.policy_loss == "clip_cov":
        mask = mask & clip_cov_candidates(covariance, clipped, settings.lower, settings.upper)
        keys = random_keys(seed, step.run_number, identity)
    else:
        keys = -covariance.numpy()
    # Select the smallest keys of all ranks: random ones for clip_cov, else largest covariance.
    (candidates,) = np.nonzero(mask.numpy())
    count = share_of(int(sums["count"]), settings.ratio)
    selected = _select(keys[candidates], identity[candidates], count, ranks)
    covariance_mask = torch.split(
        mask_at(candidates[selected], len(mask)),
        [len(inputs.mask) for _, inputs in _with_inputs(batches)],
    )
    return [
        replace(batch, loss=replace(inputs, covariance_mask=part.to(inputs.mask.device)))
        for (batch, inputs), part in zip(_with_inputs(batches), covariance_mask, strict=True)
    ]


def _token_facts(
    inputs: LossInputs, current: Tensor, algorithm: Algorithm
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each token's log-prob, advantage, whether it is trained, and whether PPO clips it."""
    _, old_log_probs = train_and_old_log_probs(current, inputs, algorithm)
    inputs, _ = with_teacher_advantages(inputs, old_log_probs, algorithm)
    clip, ratio = algorithm.loss.clip, torch.exp(current - old_log_probs)
    clipped = clipped_surrogate(ratio, inputs.advantages, low=clip.low, high=clip.highest).clipped
    # The log-prob of a masked token may be infinite, and 0 x inf in a sum is nan.
    return (
        torch.where(inputs.mask, current, 0.0).double(),
        inputs.advantages.double(),
        inputs.mask,
        clipped > 0,
    )


def _select(keys: Keys, identity: Identity, count: int, ranks: Ranks) -> Identity:
    """Return the indices of this rank's tokens among the `count` smallest keys of all ranks.

    Each rank reports its smallest. Ranks that share a model report the same tokens, which count
    once.
    """
    local = smallest_keys(keys, identity, count)
    by_rank = dict(ranks.gather((ranks.data_parallel_rank, (keys[local], identity[local]))))
    owners = np.concatenate([np.full(len(by_rank[rank][0]), rank) for rank in sorted(by_rank)])
    indices = np.concatenate([np.arange(len(by_rank[rank][0])) for rank in sorted(by_rank)])
    all_keys, all_identities = (
        np.concatenate([by_rank[rank][part] for rank in sorted(by_rank)]) for part in (0, 1)
    )
    # All ranks have the same keys now, and make the same choice.
    best = smallest_keys(all_keys, all_identities, count)
    mine: Identity = local[indices[best[owners[best] == ranks.data_parallel_rank]]]
    return mine


def _identity(batch: MicroBatch, shard: Seq[TrainSequence]) -> Identity:
    members = zip((shard[i] for i in batch.members), batch.response_lengths, strict=True)
    rows = [
        np.stack(
            np.broadcast_arrays(s.group_id, s.index, token_positions(s.branch, length)), axis=1
        )
        for s, length in members
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
    """Add up sums of all data-parallel ranks, in the same order on every rank."""
    local = {name: float(torch.stack(parts).double().sum()) for name, parts in sums.items()}
    by_rank = dict(ranks.gather((ranks.data_parallel_rank, local)))
    return {name: sum(by_rank[rank][name] for rank in sorted(by_rank)) for name in local}
