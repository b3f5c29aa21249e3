"""The pure parts between a batch and its sequences: rewards, totals, shares of the optimizer steps,
metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sluice.api import Algorithm, RLJobSpec
from sluice.samples.sample import BASELINE_REWARD, Sample, SampleStatus, TokenSequence
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.algorithms.estimators import Estimate, EstimatorError, Responses
from sluice_trainer.batch.credit import units_of_batch
from sluice_trainer.batch.estimator_inputs import (
    greedy_rewards,
    overlong_rewards,
    penalised_rewards,
    reward_parts_of,
    with_teacher_log_probs,
    zero_masked,
)
from sluice_trainer.batch.preparation import (
    batch_totals,
    by_optimizer_step,
    overlong_metrics,
    token_metrics,
    token_sums,
)
from sluice_trainer.batch.sequences import TrainSequence


def spec(**changes: object) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts": [{"path": "p"}]},
            "reward": {"type": "f1"},
            "trainer": {"steps": 1, "stepsPerBatch": 2},
            "rollout": {"sampling": {"maxResponseTokens": 100}},
            **changes,
        }
    )


def sequence(group: int, index: int, reward: float = 0.0, **fields: object) -> pb.Sequence:
    values: dict[str, Any] = {
        "length": 7,
        "response_length": 2,
        "trainable_tokens": 2,
        "status": common.SAMPLE_STATUS_COMPLETED,
    }
    return pb.Sequence(group_id=group, index=index, reward=reward, **{**values, **fields})


BATCH = [
    sequence(5, 0, 1.0),
    sequence(5, 1, 0.0),
    sequence(9, 0, 0.5, optimizer_step=1, trainable_tokens=1),
]


def test_kl_penalties_come_off_the_rewards() -> None:
    units = units_of_batch(BATCH)
    assert penalised_rewards(units, {}).tolist() == [1, 0, 0.5]
    assert penalised_rewards(units, {(9, 0, ""): 0.25}).tolist() == [1, 0, 0.25]


def test_responses_near_their_limit_lose_reward() -> None:
    """Within the last 20 of 100 tokens, 85 cost a quarter of the penalty and 100 all of it."""
    lengths = enumerate((2, 80, 85, 100))
    batch = units_of_batch([sequence(1, i, 1.0, response_length=n) for i, n in lengths])
    punished = spec(algorithm={"overlong": {"buffer": 20, "penalty": 2.0}})
    shaped = overlong_rewards(batch, punished)
    assert shaped.tolist() == [0, 0, -0.5, -2]
    assert overlong_metrics(shaped) == {"rollout/overlong_reward": -0.625, "rollout/overlong": 0.5}
    assert overlong_rewards(batch, spec()).tolist() == [0, 0, 0, 0]
    assert overlong_metrics(overlong_rewards([], punished)) == {
        "rollout/overlong_reward": 0,
        "rollout/overlong": 0,
    }


def test_an_infinite_divergence_of_a_masked_token_becomes_zero() -> None:
    masks = [torch.tensor([1, 0]), torch.tensor([1])]
    rows = [torch.tensor([0.5, float("inf")]), torch.tensor([2.0])]
    assert [row.tolist() for row in zero_masked(masks, rows) or []] == [[0.5, 0], [2]]
    assert zero_masked(masks, None) is None


def test_each_optimizer_step_has_totals() -> None:
    totals = [(t.sequences, t.tokens, t.longest) for t in batch_totals(BATCH, spec())]
    assert totals == [(2, 4, 100), (1, 1, 100)]
    assert [t.prompts for t in batch_totals(BATCH, spec())] == [{5: 4}, {9: 1}]


def test_a_failed_sample_counts_as_a_sequence() -> None:
    failed = sequence(5, 2, status=common.SAMPLE_STATUS_FAILED, trainable_tokens=0)
    assert batch_totals([*BATCH, failed], spec())[0].sequences == 3


def trained(group: int, index: int) -> TrainSequence:
    tokens, ones = np.array([1, 2, 3, 4], np.int32), np.ones(2, np.uint8)
    return TrainSequence(tokens, 2, ones, np.zeros(2, np.float32), 0.0, group_id=group, index=index)


def test_sequences_are_split_by_optimizer_step_in_batch_order() -> None:
    shard = by_optimizer_step(BATCH, [trained(5, 1), trained(9, 0), trained(5, 0)], 2)
    assert [[(s.group_id, s.index) for s in part] for part in shard] == [[(5, 1), (5, 0)], [(9, 0)]]
    assert by_optimizer_step(BATCH, [], 2) == [[], []]


def test_baselines_come_from_the_samples_metadata() -> None:
    sample = Sample(0, reward=1.0, status=SampleStatus.COMPLETED, metadata={BASELINE_REWARD: 0.5})
    assert greedy_rewards([trained(5, 0)] * 2, {(5, 0): sample}).tolist() == [0.5, 0.5]
    assert greedy_rewards([], {}).tolist() == []
    with pytest.raises(EstimatorError, match="group 5 sample 3 has no baseline_reward"):
        greedy_rewards([trained(5, 3)], {(5, 3): Sample(3)})


def test_reward_parts_come_from_the_samples() -> None:
    sample = Sample(0, reward=1.0, reward_parts={"right": 1.0, "format": 0.5})
    assert reward_parts_of((5, 0), sample, ["format", "right"]) == [0.5, 1.0]
    with pytest.raises(EstimatorError, match=r"group 5 sample 0 .* 'length'.*it has format, right"):
        reward_parts_of((5, 0), sample, ["right", "length"])
    with pytest.raises(EstimatorError, match="its reward is one number"):
        reward_parts_of((5, 0), Sample(0, reward=1.0), ["right"])


def example(**changes: object) -> Responses:
    masks = [torch.tensor([1, 1]), torch.tensor([1, 0])]
    kl = [torch.tensor([0.1, 0.3]), torch.tensor([0.2, 9.0])]
    values = {
        "rewards": torch.ones(2),
        "groups": torch.zeros(2),
        "own": torch.arange(2),
        "masks": masks,
        "kl": kl,
    }
    return Responses(**{**values, **changes})  # type: ignore[arg-type]


def test_metrics_are_means_over_the_trained_tokens() -> None:
    estimate = Estimate([torch.tensor([1.0, 2.0]), torch.tensor([6.0, 99.0])])
    sums = token_sums(example(), estimate)
    assert token_metrics(sums, Algorithm()) == {"rollout/advantages": pytest.approx(3)}
    assert token_metrics(sums, Algorithm.model_validate({"kl": {"coef": 0.1}}))[
        "rollout/kl"
    ] == pytest.approx(0.2)
    assert token_metrics(sums, Algorithm(normalize_advantages=True))["rollout/advantages"] == 0


def test_a_critic_has_metrics_of_returns_and_values() -> None:
    goals = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 99.0])]
    responses = example(values=[torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])])
    averages = token_metrics(
        token_sums(responses, Estimate(goals, goals)), Algorithm(estimator="ppo")
    )
    assert (averages["rollout/returns"], averages["rollout/values"]) == (2, 2)
    assert averages["critic/vf_explained_var"] == 1


def test_a_rank_without_responses_has_the_same_names() -> None:
    empty = example(masks=[], kl=[], values=[], own=torch.empty(0))
    names = set(token_sums(empty, Estimate([], [])))
    full = example(values=[torch.zeros(2), torch.zeros(2)])
    rows = [torch.zeros(2), torch.zeros(2)]
    assert names == set(token_sums(full, Estimate(rows, rows)))


BY_URL = Algorithm.model_validate({"distillation": {"teacher": {"url": "http://t"}}})


def test_log_probs_of_a_teacher_behind_a_url_come_with_the_samples() -> None:
    sample = Sample(0, teacher_log_probs=np.array([-0.5, -1.5], np.float32))
    [sequence_of_teacher] = with_teacher_log_probs([trained(5, 0)], {(5, 0): sample}, BY_URL)
    assert sequence_of_teacher.teacher_log_probs is not None
    assert sequence_of_teacher.teacher_log_probs.tolist() == [-0.5, -1.5]
    with pytest.raises(EstimatorError, match="group 5 sample 0 has no log-probs of the teacher"):
        with_teacher_log_probs([trained(5, 0)], {(5, 0): Sample(0)}, BY_URL)


def test_each_branch_has_its_own_log_probs_of_the_teacher() -> None:
    scores = np.array([[-0.5, -1.5], [-2.5, 0]], np.float32)
    branch = TokenSequence(teacher_log_probs=scores[1])
    sample = Sample(0, teacher_log_probs=scores[0], branches=[branch])
    pair = [trained(5, 0), replace(trained(5, 0), branch=1)]
    rows = [
        sequence.teacher_log_probs
        for sequence in with_teacher_log_probs(pair, {(5, 0): sample}, BY_URL)
    ]
    assert [row.tolist() for row in rows if row is not None] == scores.tolist()


def test_stored_log_probs_are_ignored_unless_the_teacher_has_a_url() -> None:
    """Rollouts of one teacher may be replayed with another, or without a teacher."""
    sample = Sample(0, teacher_log_probs=np.array([-0.5, -1.5], np.float32))
    by_path = Algorithm.model_validate({"distillation": {"teacher": {"path": "t"}}})
    for algorithm in (by_path, Algorithm()):
        [unscored] = with_teacher_log_probs([trained(5, 0)], {(5, 0): sample}, algorithm)
        assert unscored.teacher_log_probs is None
