"""The inputs of an advantage estimator, gathered from a batch.

Every rank knows the rewards of the whole batch, and the tokens of its share. What an estimator
needs of other ranks' tokens is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sluice.api import Algorithm, RLJobSpec
from sluice.samples.sample import BASELINE_REWARD, Sample, SampleGroup
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.algorithms.estimators import EstimatorError, Responses
from sluice_trainer.algorithms.shaping import overlong_reward
from sluice_trainer.backend import Backend
from sluice_trainer.batch import credit
from sluice_trainer.batch.credit import CreditUnit, SampleKey, UnitKey
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True)
class EstimatorInputs:
    """The inputs of an estimator on one rank.

    Attributes
    ----------
    sequences
        Sequences of this rank, in the order of `responses.own`.
    units
        Units of credit of the whole batch.
    responses
        Input of the estimator.
    overlong
        [units] float32, the rewards that `algorithm.overlong` has added.
    valid_samples
        Samples of the whole batch that have not failed.

    """

    sequences: list[TrainSequence]
    units: list[CreditUnit]
    responses: Responses
    overlong: Tensor
    valid_samples: int


def estimator_inputs(
    policy: Backend,
    batch: Sequence[pb.Sequence],
    groups: Sequence[SampleGroup],
    algorithm: Algorithm,
) -> EstimatorInputs:
    """Gather the inputs of the estimator. Collective.

    Failed samples are left out: they are no baseline for others and are not trained on.

    Parameters
    ----------
    policy
        Scores this rank's sequences.
    batch
        Metadata of all samples.
    groups
        Samples of this rank.
    algorithm
        The algorithm, with the KL coefficient of this step.

    """
    spec, ranks = policy.spec, policy.ranks
    valid = [s for s in batch if s.status != common.SAMPLE_STATUS_FAILED]
    samples = _valid_samples(valid, groups)
    # Seats and turns are only in the samples, which must then be gathered from all ranks.
    if spec.rollout.seats or algorithm.turn_advantage:
        units = credit.units_of_samples(valid, samples, ranks)
    else:
        units = credit.units_of_batch(valid)
    routed = spec.trainer.routing_replay == "rollout"
    sequences = [
        sequence
        for (group, _), sample in samples.items()
        for sequence in TrainSequence.from_sample(group, sample, 0.0, policy.step, routed=routed)
    ]
    # The KL is needed as part of the reward, before advantages are estimated.
    sequences, kl = policy.with_kl(with_teacher_log_probs(sequences, samples, algorithm))
    masks = [torch.tensor(s.loss_mask) for s in sequences]
    kl = zero_masked(masks, kl)
    overlong = overlong_rewards(units, spec)
    index = {unit.key: i for i, unit in enumerate(units)}
    kind = algorithm.kind
    # Some arguments are collective calls: all ranks must make them in the same order.
    responses = Responses(
        rewards=penalised_rewards(units, _kl_penalties(sequences, kl, algorithm, ranks)) + overlong,
        groups=torch.tensor(credit.groups_of(units)),
        lengths=torch.tensor([unit.trained_tokens for unit in units]),
        own=torch.tensor([index[unit_key(s)] for s in sequences], dtype=torch.int64),
        masks=masks,
        kl=kl or [torch.zeros(len(mask)) for mask in masks],
        values=policy.values(sequences),
        baselines=greedy_rewards(sequences, samples) if kind.greedy else None,
        parts=_reward_parts(valid, samples, algorithm, ranks) if kind.parts else None,
        energies=_trained_energies(units, sequences, policy) if kind.energies else None,
    )
    if algorithm.turn_advantage:
        responses = by_turn(responses, units, sequences, samples, algorithm.turn_advantage.gamma)
    return EstimatorInputs(sequences, units, responses, overlong, len(valid))


def unit_key(sequence: TrainSequence) -> UnitKey:
    """Return the key of the unit that a sequence belongs to."""
    return sequence.group_id, sequence.index, sequence.seat


def _valid_samples(
    valid: Sequence[pb.Sequence], groups: Sequence[SampleGroup]
) -> dict[SampleKey, Sample]:
    """Return this rank's samples that have not failed."""
    keys = {(s.group_id, s.index) for s in valid}
    return {
        (group.group_id, sample.index): sample
        for group in groups
        for sample in group.samples
        if (group.group_id, sample.index) in keys
    }


def with_teacher_log_probs(
    sequences: Sequence[TrainSequence], samples: Mapping[SampleKey, Sample], algorithm: Algorithm
) -> list[TrainSequence]:
    """Return the sequences with the log-probs that rollout workers got from a teacher's URL.

    A teacher in the trainer scores in the training step instead.

    Raises
    ------
    EstimatorError
        A sample has no log-probs of the teacher.

    """
    if algorithm.distillation is None or algorithm.distillation.teacher.url is None:
        return list(sequences)
    scored = []
    for sequence in sequences:
        sample = samples[sequence.group_id, sequence.index]
        # Each branch was scored separately.
        values = sample.sequences[sequence.branch].teacher_log_probs
        if values is None and sequence.response_length:
            raise EstimatorError(
                f"group {sequence.group_id} sample {sequence.index} has no log-probs of the "
                "teacher: no rollout worker has asked it"
            )
        scores = torch.empty(0) if values is None else torch.tensor(values, dtype=torch.float32)
        scored.append(replace(sequence, teacher_log_probs=scores))
    return scored


# --- rewards


def penalised_rewards(units: Sequence[CreditUnit], penalties: Mapping[UnitKey, float]) -> Tensor:
    """Return the rewards less the KL penalties of whole responses, [units] float32."""
    return torch.tensor(
        [unit.reward - penalties.get(unit.key, 0.0) for unit in units], dtype=torch.float32
    )


def _kl_penalties(
    sequences: Sequence[TrainSequence],
    kl: Sequence[Tensor] | None,
    algorithm: Algorithm,
    ranks: Ranks,
) -> dict[UnitKey, float]:
    """Return `kl.coef` times the KL of each response of the whole batch.

    Empty if the KL is 0 or is subtracted token by token.
    """
    # The penalty is subtracted before group advantages are formed, which for an outcome reward
    # equals verl's `use_kl_in_reward`. (slime computes this KL for grpo and then drops it.)
    if kl is None or algorithm.kind.token_kl:
        return {}
    penalties: defaultdict[UnitKey, float] = defaultdict(float)
    for s, values in zip(sequences, kl, strict=True):
        total = float((values * torch.tensor(s.loss_mask)).sum())
        penalties[unit_key(s)] += algorithm.kl.coef * total
    return {key: value for part in ranks.gather(penalties) for key, value in part.items()}


def zero_masked(masks: Sequence[Tensor], rows: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Return the rows with 0 at masked tokens, each [response].

    An infinite KL at a masked token would turn the reward into nan.
    """
    if rows is None:
        return None
    return [torch.where(mask > 0, row, 0.0) for mask, row in zip(masks, rows, strict=True)]


def overlong_rewards(units: Sequence[CreditUnit], spec: RLJobSpec) -> Tensor:
    """Return the rewards that `overlong` adds, at most 0. [units] float32."""
    overlong = spec.algorithm.overlong
    if overlong is None:
        return torch.zeros(len(units))
    return overlong_reward(
        torch.tensor([unit.response_length for unit in units]),
        longest=spec.rollout.sampling.max_response_tokens,
        buffer=overlong.buffer,
        penalty=overlong.penalty,
    )


def by_turn(
    responses: Responses,
    units: Sequence[CreditUnit],
    sequences: Sequence[TrainSequence],
    samples: Mapping[SampleKey, Sample],
    gamma: float,
) -> Responses:
    """Return the responses with rewards and groups of turns instead of units."""
    turns = credit.turn_returns(units, responses.rewards.tolist(), gamma)
    first_turns = {unit.key: start for unit, start in zip(units, turns.first_turns, strict=True)}
    return replace(
        responses,
        rewards=turns.rewards,
        groups=turns.groups,
        own_tokens=credit.turn_indices(sequences, samples, first_turns),
    )


# --- what only some estimators need


def greedy_rewards(
    sequences: Sequence[TrainSequence], samples: Mapping[SampleKey, Sample]
) -> Tensor:
    """Return the reward of the greedy response to each sequence's prompt, [sequences] float32.

    Raises
    ------
    EstimatorError
        A sample has no reward of a greedy response.

    """
    for (group, index), sample in samples.items():
        if not isinstance(sample.metadata.get(BASELINE_REWARD), int | float):
            raise EstimatorError(
                f"group {group} sample {index} has no {BASELINE_REWARD}, which remax needs"
            )
    rewards = [samples[s.group_id, s.index].metadata[BASELINE_REWARD] for s in sequences]
    return torch.tensor(rewards, dtype=torch.float32)


def _reward_parts(
    valid: Sequence[pb.Sequence],
    samples: Mapping[SampleKey, Sample],
    algorithm: Algorithm,
    ranks: Ranks,
) -> Tensor:
    """Return `algorithm.rewardParts` of the whole batch, [samples, parts] float32. Collective."""
    names = [part.name for part in algorithm.reward_parts]
    local = {key: reward_parts_of(key, sample, names) for key, sample in samples.items()}
    parts = {key: values for part in ranks.gather(local) for key, values in part.items()}
    rows = [parts[s.group_id, s.index] for s in valid]
    return torch.tensor(rows, dtype=torch.float32).reshape(len(valid), len(names))


def reward_parts_of(key: SampleKey, sample: Sample, names: Sequence[str]) -> list[float]:
    """Return the named parts of a sample's reward.

    Raises
    ------
    EstimatorError
        The sample lacks a part.

    """
    missing = [name for name in names if name not in sample.reward_parts]
    if missing:
        group, index = key
        present = ", ".join(sorted(sample.reward_parts)) or "none: its reward is one number"
        raise EstimatorError(
            f"group {group} sample {index} has no reward part {missing[0]!r} "
            f"(algorithm.rewardParts); it has {present}"
        )
    return [sample.reward_parts[name] for name in names]


def _trained_energies(
    units: Sequence[CreditUnit], sequences: Sequence[TrainSequence], policy: Backend
) -> list[Tensor]:
    """Return the energies of each unit's trained tokens, branch after branch. Collective.

    Each [trained tokens] float32, for the units of the whole batch.
    """
    local: dict[UnitKey, list[Tensor]] = {}
    for sequence, row in zip(sequences, policy.energies(sequences), strict=True):
        trained = row[torch.tensor(sequence.loss_mask) > 0]
        local.setdefault(unit_key(sequence), []).append(trained)
    energies = {key: rows for part in policy.ranks.gather(local) for key, rows in part.items()}
    return [torch.cat(energies[unit.key]) for unit in units]
