"""Facts of samples that estimators need beside rewards: baselines, parts of rewards, energies,
and a teacher's log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sluice.api import Algorithm
from sluice.samples.sample import BASELINE_REWARD, Sample
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.algorithms.estimators import (
    EstimatorError,
)
from sluice_trainer.backend import Backend
from sluice_trainer.batch.credit import SampleKey, Unit, UnitKey
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.distributed.ranks import Ranks


def key_of(sequence: TrainSequence) -> UnitKey:
    """The unit that a sequence is of."""
    return sequence.group_id, sequence.index, sequence.seat


def baselines(sequences: Sequence[TrainSequence], samples: dict[SampleKey, Sample]) -> Tensor:
    """Reward of the greedy response to each sequence's prompt, [sequences] float32."""
    for (group, index), sample in samples.items():
        if not isinstance(sample.metadata.get(BASELINE_REWARD), int | float):
            raise EstimatorError(
                f"group {group} sample {index} has no {BASELINE_REWARD}, which remax needs"
            )
    rewards = [samples[s.group_id, s.index].metadata[BASELINE_REWARD] for s in sequences]
    return torch.tensor(rewards, dtype=torch.float32)


def reward_parts(
    sound: Sequence[pb.Sequence],
    samples: dict[SampleKey, Sample],
    algorithm: Algorithm,
    ranks: Ranks,
) -> Tensor:
    """`algorithm.rewardParts` of the whole batch, [samples, parts] float32. Collective."""
    names = [part.name for part in algorithm.reward_parts]
    of_rank = {key: parts_of(key, sample, names) for key, sample in samples.items()}
    known = {key: values for part in ranks.gather(of_rank) for key, values in part.items()}
    rows = [known[s.group_id, s.index] for s in sound]
    return torch.tensor(rows, dtype=torch.float32).reshape(len(sound), len(names))


def parts_of(key: SampleKey, sample: Sample, names: Sequence[str]) -> list[float]:
    """These parts of a sample's reward. Raises EstimatorError where it lacks one."""
    missing = [name for name in names if name not in sample.reward_parts]
    if missing:
        group, index = key
        there = ", ".join(sorted(sample.reward_parts)) or "none: its reward is one number"
        raise EstimatorError(
            f"group {group} sample {index} has no reward part {missing[0]!r} "
            f"(algorithm.rewardParts); it has {there}"
        )
    return [sample.reward_parts[name] for name in names]


def trained_energies(
    units: Sequence[Unit], sequences: Sequence[TrainSequence], policy: Backend
) -> list[Tensor]:
    """The energies of each unit's trained tokens, branch after branch: of the whole batch, each
    [trained tokens] float32.
    sequences: of this rank. Collective.
    """
    of_rank: dict[UnitKey, list[Tensor]] = {}
    for sequence, row in zip(sequences, policy.energies(sequences), strict=True):
        trained = row[torch.tensor(sequence.loss_mask) > 0]
        of_rank.setdefault(key_of(sequence), []).append(trained)
    known = {key: rows for part in policy.ranks.gather(of_rank) for key, rows in part.items()}
    return [torch.cat(known[unit.key]) for unit in units]


def taught(
    sequences: Sequence[TrainSequence], samples: dict[SampleKey, Sample], algorithm: Algorithm
) -> list[TrainSequence]:
    """With the log-probs that the rollout had from a teacher behind a URL. One in the trainer
    scores in the step.
    """
    if algorithm.distillation is None or algorithm.distillation.teacher.url is None:
        return list(sequences)
    scored = []
    for sequence in sequences:
        sample = samples[sequence.group_id, sequence.index]
        values = sample.sequences[sequence.branch].teacher_log_probs
        if values is None and sequence.response_length:
            where = f"group {sequence.group_id} sample {sequence.index}"
            raise EstimatorError(
                f"{where} has no log-probs of the teacher: no rollout worker has asked it"
            )
        scores = torch.empty(0) if values is None else torch.tensor(values, dtype=torch.float32)
        scored.append(replace(sequence, teacher_log_probs=scores))
    return scored
