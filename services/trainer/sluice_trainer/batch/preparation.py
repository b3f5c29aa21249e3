"""From a batch and its rewards to sequences with advantages: everything between taking a batch and
its gradient.

Every rank sees the rewards of the whole batch and the tokens of its own share. What must be known
of the others' tokens (KL penalties of a group's other responses, the sums that whitening needs) is
gathered and merged by data-parallel rank: ranks that share a model hold the same sequences. A
failed response is nobody's baseline and is not trained on; it still counts as a sequence of its
step. A response that is a tree has several sequences here (`Sample.branches`), and one reward, one
advantage and one place in its group: each of its sequences is trained with them. Where a job has
seats that holds for each seat of a response, and with `turnAdvantage` for each turn (`credit`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sluice.api import Algorithm, RLJobSpec
from sluice.samples.sample import Sample, SampleGroup
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.algorithms.advantages import whiten
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.algorithms.estimators import (
    Custom,
    Estimate,
    Responses,
    estimate,
)
from sluice_trainer.algorithms.kl import adapted_coef
from sluice_trainer.algorithms.shaping import overlong_reward
from sluice_trainer.backend import Backend
from sluice_trainer.batch import credit
from sluice_trainer.batch.batch_sums import metrics, over_data_parallel, token_sums
from sluice_trainer.batch.credit import SampleKey, Unit, UnitKey
from sluice_trainer.batch.estimator_inputs import (
    baselines,
    key_of,
    reward_parts,
    taught,
    trained_energies,
)
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Prepared:
    """shard: this rank's sequences by optimizer step, in batch order; totals: of each step, over
    all ranks.
    """

    shard: list[list[TrainSequence]]
    totals: list[BatchTotals]
    metrics: dict[str, float]


def learn(
    policy: Backend,
    custom: Custom | None,
    batch: Sequence[pb.Sequence],
    groups: Sequence[SampleGroup],
) -> dict[str, float]:
    """One step of training on a batch; its metrics. custom: the user's own estimator.
    Collective.
    """
    prepared = prepare(policy, batch, groups, custom)
    return prepared.metrics | policy.train(prepared.shard, prepared.totals)


def prepare(
    policy: Backend,
    batch: Sequence[pb.Sequence],
    groups: Sequence[SampleGroup],
    custom: Custom | None = None,
) -> Prepared:
    """Rewards to advantages. batch: the metadata of all sequences; groups: this rank's samples.
    Collective.
    """
    spec, algorithm = policy.spec, with_kl_coef(policy.spec.algorithm, policy.kl_coef)
    if algorithm.sft:
        return Prepared(_answers(batch, groups, spec), batch_totals(batch, spec), {})
    sound = [s for s in batch if s.status != common.SAMPLE_STATUS_FAILED]
    sound_keys = {(s.group_id, s.index) for s in sound}
    samples = {
        (g.group_id, s.index): s
        for g in groups
        for s in g.samples
        if (g.group_id, s.index) in sound_keys
    }
    in_parts = spec.rollout.seats or algorithm.turn_advantage
    units = credit.of_samples(sound, samples, policy.ranks) if in_parts else credit.of_batch(sound)
    place = {unit.key: i for i, unit in enumerate(units)}
    sequences = [
        sequence
        for (group, _), sample in samples.items()
        for sequence in TrainSequence.of(
            group, sample, 0.0, policy.step, routed=spec.trainer.routing_replay == "rollout"
        )
    ]
    sequences_of_rank, kl = policy.with_kl(taught(sequences, samples, algorithm))
    masks = [torch.tensor(s.loss_mask) for s in sequences_of_rank]
    kl = within(masks, kl)
    shaped = shaping(units, spec)
    responses = Responses(
        rewards=rewards(units, _penalties(sequences_of_rank, kl, algorithm, policy.ranks)) + shaped,
        groups=torch.tensor(credit.groups_of(units)),
        lengths=torch.tensor([unit.trained for unit in units]),
        own=torch.tensor([place[key_of(s)] for s in sequences], dtype=torch.int64),
        masks=masks,
        kl=kl or [torch.zeros(len(mask)) for mask in masks],
        values=policy.values(sequences_of_rank),
        baselines=baselines(sequences, samples) if algorithm.kind.greedy else None,
        parts=reward_parts(sound, samples, algorithm, policy.ranks)
        if algorithm.kind.parts
        else None,
        energies=trained_energies(units, sequences_of_rank, policy)
        if algorithm.kind.energies
        else None,
    )
    if algorithm.turn_advantage:
        responses = by_turn(responses, units, sequences, samples, algorithm.turn_advantage.gamma)
    estimates = estimate(responses, algorithm, custom)
    sums = over_data_parallel(policy.ranks, token_sums(responses, estimates))
    if algorithm.whitens:
        estimates = replace(
            estimates, advantages=[whiten(a, sums["advantages"]) for a in estimates.advantages]
        )
    shard = by_optimizer_step(
        batch,
        _with_estimates(sequences_of_rank, responses, estimates),
        spec.trainer.steps_per_batch,
    )
    measured = metrics(sums, algorithm) | credit.metrics(units)
    if algorithm.overlong:
        measured |= overlong_metrics(shaped)
    if adaptive := algorithm.kl.adaptive:
        measured["rollout/kl_coef"] = policy.kl_coef
        policy.kl_coef = adapted_coef(
            policy.kl_coef,
            float(sums["kl"].mean),
            len(sound),
            target=adaptive.target,
            horizon=adaptive.horizon,
        )
    return Prepared(shard, batch_totals(batch, spec), measured)


def within(masks: Sequence[Tensor], rows: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Rows with 0 at masked tokens, where an infinite KL would become a reward that is no
    number. masks, rows: each [response].
    """
    if rows is None:
        return None
    return [torch.where(mask > 0, row, 0.0) for mask, row in zip(masks, rows, strict=True)]


def with_kl_coef(algorithm: Algorithm, coef: float) -> Algorithm:
    """The algorithm with the KL penalty's coefficient of a step: a controller may have moved it."""
    return algorithm.model_copy(update={"kl": algorithm.kl.model_copy(update={"coef": coef})})


def rewards(units: Sequence[Unit], penalties: dict[UnitKey, float]) -> Tensor:
    """Rewards of the batch, [units] float32, less the KL penalties of whole responses."""
    return torch.tensor(
        [unit.reward - penalties.get(unit.key, 0.0) for unit in units], dtype=torch.float32
    )


def by_turn(
    responses: Responses,
    units: Sequence[Unit],
    sequences: Sequence[TrainSequence],
    samples: dict[SampleKey, Sample],
    gamma: float,
) -> Responses:
    """The responses with each turn in the place of a sample of its own."""
    turns = credit.turn_returns(units, responses.rewards.tolist(), gamma)
    first = {unit.key: start for unit, start in zip(units, turns.first, strict=True)}
    return replace(
        responses,
        rewards=turns.rewards,
        groups=turns.groups,
        own_tokens=credit.own_places(sequences, samples, first),
    )


def shaping(units: Sequence[Unit], spec: RLJobSpec) -> Tensor:
    """Rewards that `overlong` adds to those of the batch, at most 0. [units] float32"""
    overlong = spec.algorithm.overlong
    if overlong is None:
        return torch.zeros(len(units))
    return overlong_reward(
        torch.tensor([unit.response_length for unit in units]),
        longest=spec.rollout.sampling.max_response_tokens,
        buffer=overlong.buffer,
        penalty=overlong.penalty,
    )


def overlong_metrics(shaped: Tensor) -> dict[str, float]:
    """Verl's names: mean of the penalty, and share of responses that have one."""
    count = max(len(shaped), 1)
    return {
        "rollout/overlong_reward": float(shaped.sum()) / count,
        "rollout/overlong": float((shaped < 0).sum()) / count,
    }


def _penalties(
    sequences: Sequence[TrainSequence],
    kl: Sequence[Tensor] | None,
    algorithm: Algorithm,
    ranks: Ranks,
) -> dict[UnitKey, float]:
    """`kl.coef` times each response's KL, of the whole batch; empty where it comes off token by
    token, or is 0.

    It comes off the reward *before* group advantages are formed, which for an outcome reward equals
    verl's `use_kl_in_reward`. (slime computes this KL for grpo and then drops it.)
    """
    if kl is None or algorithm.kind.token_kl:
        return {}
    penalties: defaultdict[UnitKey, float] = defaultdict(float)
    for s, values in zip(sequences, kl, strict=True):
        total = float((values * torch.tensor(s.loss_mask)).sum())
        penalties[key_of(s)] += algorithm.kl.coef * total
    return {key: value for part in ranks.gather(penalties) for key, value in part.items()}


def _with_estimates(
    sequences: Sequence[TrainSequence], responses: Responses, estimates: Estimate
) -> list[TrainSequence]:
    values, returns = (
        [None] * len(sequences) if rows is None else rows
        for rows in (responses.values, estimates.returns)
    )
    return [
        replace(s, advantage=advantage.numpy(), values=value, returns=goal)
        for s, advantage, value, goal in zip(
            sequences, estimates.advantages, values, returns, strict=True
        )
    ]


def _answers(
    batch: Sequence[pb.Sequence], groups: Sequence[SampleGroup], spec: RLJobSpec
) -> list[list[TrainSequence]]:
    """This rank's given answers by optimizer step: there is nothing to estimate."""
    answers = [
        sequence
        for group in groups
        for sample in group.samples
        for sequence in TrainSequence.of(group.group_id, sample, 0.0)
    ]
    return by_optimizer_step(batch, answers, spec.trainer.steps_per_batch)


def by_optimizer_step(
    batch: Sequence[pb.Sequence], sequences: Sequence[TrainSequence], steps: int
) -> list[list[TrainSequence]]:
    """This rank's sequences by optimizer step."""
    of_step = {(s.group_id, s.index): s.optimizer_step for s in batch}
    shard: list[list[TrainSequence]] = [[] for _ in range(steps)]
    for sequence in sequences:
        shard[of_step[sequence.group_id, sequence.index]].append(sequence)
    return shard


def batch_totals(batch: Sequence[pb.Sequence], spec: RLJobSpec) -> list[BatchTotals]:
    """The content of each optimizer step over all ranks: the denominators of its loss."""
    parts = [
        [s for s in batch if s.optimizer_step == step]
        for step in range(spec.trainer.steps_per_batch)
    ]
    longest = spec.rollout.sampling.max_response_tokens
    return [
        BatchTotals(
            len(part), sum(s.trainable_tokens for s in part), longest, tokens_of_prompts(part)
        )
        for part in parts
    ]


def tokens_of_prompts(part: Sequence[pb.Sequence]) -> dict[int, int]:
    """Group id -> trained tokens of its responses in an optimizer step."""
    tokens: Counter[int] = Counter()
    for sequence in part:
        tokens[sequence.group_id] += sequence.trainable_tokens
    return dict(tokens)
