"""The preparation of a batch: from rewards to sequences with advantages.

Every rank sees the rewards of the whole batch and the tokens of its share. What it needs of the
other tokens (KL penalties of a group's other responses, the sums for whitening) is gathered and
merged by data-parallel rank, since ranks that share a model hold the same sequences.

A failed response is not trained on, but counts as a sequence of its step. A response that is a tree
has several sequences (`Sample.branches`) with one reward and one advantage. With seats the same
holds for each seat of a response, and with `turnAdvantage` for each turn (`credit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from sluice.api import Algorithm, RLJobSpec
from sluice.samples.sample import SampleGroup
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.algorithms.advantages import Moments, moments, whiten
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.algorithms.estimators import CustomEstimator, Estimate, Responses, estimate
from sluice_trainer.algorithms.kl import adapted_coef
from sluice_trainer.algorithms.value_loss import explained_variance
from sluice_trainer.backend import Backend
from sluice_trainer.batch import credit
from sluice_trainer.batch.estimator_inputs import EstimatorInputs, estimator_inputs
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch that is ready to train on.

    Attributes
    ----------
    shard
        Sequences of this rank by optimizer step, in batch order.
    totals
        Totals of each optimizer step over all ranks.
    metrics
        Metrics of the preparation.

    """

    shard: list[list[TrainSequence]]
    totals: list[BatchTotals]
    metrics: dict[str, float]


def learn(
    policy: Backend,
    custom: CustomEstimator | None,
    batch: Sequence[pb.Sequence],
    groups: Sequence[SampleGroup],
) -> dict[str, float]:
    """Make one training step on a batch and return its metrics. Collective.

    Parameters
    ----------
    policy
        The policy to train.
    custom
        The estimator that `algorithm.function` names.
    batch
        Metadata of all samples.
    groups
        Samples of this rank.

    """
    prepared = prepare(policy, batch, groups, custom)
    return prepared.metrics | policy.train(prepared.shard, prepared.totals)


def prepare(
    policy: Backend,
    batch: Sequence[pb.Sequence],
    groups: Sequence[SampleGroup],
    custom: CustomEstimator | None = None,
) -> PreparedBatch:
    """Turn rewards into advantages. Collective; for the parameters see `learn`."""
    spec, steps = policy.spec, policy.spec.trainer.steps_per_batch
    totals = batch_totals(batch, spec)
    if spec.algorithm.offline:
        answers = given_answers(groups, spec.algorithm)
        return PreparedBatch(by_optimizer_step(batch, answers, steps), totals, {})

    # Advantages of this rank's sequences, from the rewards of the whole batch.
    algorithm = _with_kl_coef(spec.algorithm, policy.kl_coef)
    inputs = estimator_inputs(policy, batch, groups, algorithm)
    estimates = estimate(inputs.responses, algorithm, custom)
    sums = _sum_over_ranks(policy.ranks, token_sums(inputs.responses, estimates))
    # Whitening needs the mean and variance over the tokens of all ranks.
    if algorithm.whitens:
        advantages = [whiten(a, sums["advantages"]) for a in estimates.advantages]
        estimates = replace(estimates, advantages=advantages)
    # Sequences for the optimizer steps, and what to record of them.
    sequences = _with_estimates(inputs, estimates)
    metrics = token_metrics(sums, algorithm) | credit.metrics(inputs.units)
    if algorithm.overlong:
        metrics |= overlong_metrics(inputs.overlong)
    if algorithm.kl.adaptive:
        # The metric is the coefficient of this step; the new one counts from the next step on.
        metrics["rollout/kl_coef"] = policy.kl_coef
        _adapt_kl_coef(policy, float(sums["kl"].mean), inputs.valid_samples)
    return PreparedBatch(by_optimizer_step(batch, sequences, steps), totals, metrics)


def given_answers(groups: Sequence[SampleGroup], algorithm: Algorithm) -> list[TrainSequence]:
    """Return rows with given answers as sequences.

    There is no advantage to estimate: a sample's reward is what its row says.
    """
    return [
        sequence.at_end() if algorithm.trains_reward_model else sequence
        for group in groups
        for sample in group.samples
        for sequence in TrainSequence.from_sample(group.group_id, sample, sample.reward or 0.0)
    ]


def _with_kl_coef(algorithm: Algorithm, coef: float) -> Algorithm:
    """Return the algorithm with the KL coefficient of this step, which may have been adapted."""
    return algorithm.model_copy(update={"kl": algorithm.kl.model_copy(update={"coef": coef})})


def _adapt_kl_coef(policy: Backend, divergence: float, samples: int) -> None:
    adaptive = policy.spec.algorithm.kl.adaptive
    assert adaptive is not None
    policy.kl_coef = adapted_coef(
        policy.kl_coef, divergence, samples, target=adaptive.target, horizon=adaptive.horizon
    )


def _with_estimates(inputs: EstimatorInputs, estimates: Estimate) -> list[TrainSequence]:
    """Return the sequences with their advantages, values and returns."""
    absent = [None] * len(inputs.sequences)
    values = inputs.responses.values or absent
    returns = estimates.returns or absent
    return [
        replace(s, advantage=advantage.numpy(), values=value, returns=target)
        for s, advantage, value, target in zip(
            inputs.sequences, estimates.advantages, values, returns, strict=True
        )
    ]


# --- optimizer steps


def by_optimizer_step(
    batch: Sequence[pb.Sequence], sequences: Sequence[TrainSequence], steps: int
) -> list[list[TrainSequence]]:
    """Split this rank's sequences by optimizer step."""
    step_of = {(s.group_id, s.index): s.optimizer_step for s in batch}
    shard: list[list[TrainSequence]] = [[] for _ in range(steps)]
    for sequence in sequences:
        shard[step_of[sequence.group_id, sequence.index]].append(sequence)
    return shard


def batch_totals(batch: Sequence[pb.Sequence], spec: RLJobSpec) -> list[BatchTotals]:
    """Return the totals of each optimizer step over all ranks: the denominators of its loss."""
    parts = [
        [s for s in batch if s.optimizer_step == step]
        for step in range(spec.trainer.steps_per_batch)
    ]
    longest = spec.rollout.sampling.max_response_tokens
    return [
        BatchTotals(len(part), sum(s.trainable_tokens for s in part), longest, _prompt_tokens(part))
        for part in parts
    ]


def _prompt_tokens(part: Sequence[pb.Sequence]) -> dict[int, int]:
    """Return group id -> trained tokens of its responses in an optimizer step."""
    tokens: Counter[int] = Counter()
    for sequence in part:
        tokens[sequence.group_id] += sequence.trainable_tokens
    return dict(tokens)


# --- sums and metrics over all trained tokens


def token_sums(responses: Responses, estimates: Estimate) -> dict[str, Moments]:
    """Sum over this rank's trained tokens.

    The names are equal on all ranks, also on a rank without responses.
    """
    mask = _joined(responses.masks)
    tokens = {"advantages": _joined(estimates.advantages), "kl": _joined(responses.kl)}
    if estimates.returns is not None and responses.values is not None:
        tokens |= {"returns": _joined(estimates.returns), "values": _joined(responses.values)}
        tokens["errors"] = tokens["returns"] - tokens["values"]
    return {name: moments(values, mask) for name, values in tokens.items()}


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(rows)) if rows else torch.empty(0)


def _sum_over_ranks(ranks: Ranks, local: dict[str, Moments]) -> dict[str, Moments]:
    """Add up the sums of all data-parallel ranks, in the same order on every rank. Collective."""
    by_rank = dict(ranks.gather((ranks.data_parallel_rank, local)))
    return {name: reduce(add, (by_rank[rank][name] for rank in sorted(by_rank))) for name in local}


def token_metrics(sums: dict[str, Moments], algorithm: Algorithm) -> dict[str, float]:
    """Return means over the trained tokens (slime's names) and the critic's accuracy (verl's)."""
    shown = [name for name in ("returns", "values") if name in sums] + (
        ["kl"] if algorithm.kl.coef > 0 or algorithm.kl.adaptive else []
    )
    result = {f"rollout/{name}": float(sums[name].mean) for name in shown}
    result["rollout/advantages"] = 0.0 if algorithm.whitens else float(sums["advantages"].mean)
    if "errors" in sums:
        result["critic/vf_explained_var"] = explained_variance(sums["returns"], sums["errors"])
    return result


def overlong_metrics(overlong: Tensor) -> dict[str, float]:
    """Return the mean penalty and the share of responses that have one (verl's names)."""
    count = max(len(overlong), 1)
    return {
        "rollout/overlong_reward": float(overlong.sum()) / count,
        "rollout/overlong": float((overlong < 0).sum()) / count,
    }
