"""The pure parts of the training loop: advantages over the whole batch, shares of a rank, metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sluice.api import RLJobSpec
from sluice.sample import Prompt, Sample, SampleGroup, SampleStatus
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.loop import batch_advantages, batch_totals, split_optimizer_steps, whiten_over_tokens
from sluice_trainer.recorder import batch_metrics


def spec(**algorithm: object) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts": [{"path": "p"}]},
            "reward": {"type": "f1"},
            "trainer": {"steps": 1},
            "algorithm": algorithm,
        }
    )


def sequence(group: int, index: int, reward: float, **fields: object) -> pb.Sequence:
    values = {"length": 7, "response_length": 2, "trainable_tokens": 2, "status": common.SAMPLE_STATUS_COMPLETED}
    return pb.Sequence(group_id=group, index=index, reward=reward, **{**values, **fields})


BATCH = [sequence(5, 0, 1.0), sequence(5, 1, 0.0), sequence(9, 0, 0.5), sequence(9, 1, 0.5)]


def test_advantages_are_relative_to_the_group() -> None:
    found = batch_advantages(BATCH, {}, spec(normalizeStd=False))
    assert found == {(5, 0): 0.5, (5, 1): -0.5, (9, 0): 0.0, (9, 1): 0.0}


def test_the_order_of_the_batch_does_not_matter() -> None:
    assert batch_advantages(BATCH[::-1], {}, spec()) == batch_advantages(BATCH, {}, spec())


def test_a_failed_sample_is_no_baseline() -> None:
    batch = [sequence(1, 0, 1.0), sequence(1, 1, 0.0), sequence(1, 2, 0.0, status=common.SAMPLE_STATUS_FAILED)]
    assert batch_advantages(batch, {}, spec(normalizeStd=False)) == {(1, 0): 0.5, (1, 1): -0.5, (1, 2): 0.0}


def test_kl_penalties_come_off_the_rewards() -> None:
    found = batch_advantages(BATCH, {(9, 0): 0.2}, spec(normalizeStd=False))
    assert found[9, 0] == pytest.approx(-0.1)
    assert found[9, 1] == pytest.approx(0.1)


def test_whitening_counts_each_token() -> None:
    advantages, tokens = torch.tensor([1.0, -1.0]), torch.tensor([3, 1])
    per_token = torch.tensor([1.0, 1.0, 1.0, -1.0])
    expected = (per_token - per_token.mean()) / per_token.std()
    assert whiten_over_tokens(advantages, tokens).tolist() == pytest.approx([expected[0].item(), expected[3].item()])


def test_shares_follow_the_optimizer_steps() -> None:
    batch = [sequence(5, 0, 1.0), sequence(5, 1, 0.0), sequence(9, 0, 0.5, optimizer_step=1, trainable_tokens=1)]
    assert [(t.sequences, t.tokens) for t in batch_totals(batch, 2)] == [(2, 4), (1, 1)]
    group = SampleGroup(Prompt(5, "p"), [made(0), made(1)])
    other = SampleGroup(Prompt(9, "p"), [made(0)])
    shard = split_optimizer_steps([group, other], batch, {(5, 0): 1.0, (5, 1): -1.0, (9, 0): 0.5}, 2)
    assert [[(s.group_id, s.index, s.advantage) for s in part] for part in shard] == [
        [(5, 0, 1.0), (5, 1, -1.0)],
        [(9, 0, 0.5)],
    ]


def made(index: int) -> Sample:
    sample = Sample(index, reward=1.0, status=SampleStatus.COMPLETED)
    sample.append_prompt([1, 2])
    sample.append([3, 4], [-1.0, -1.0], [])
    assert isinstance(sample.tokens, np.ndarray)
    return sample


def test_metrics_of_a_batch() -> None:
    batch = [
        sequence(1, 0, 1.0, min_version=3, max_version=4),
        sequence(1, 1, 1.0, min_version=4, max_version=4, response_length=6, status=common.SAMPLE_STATUS_TRUNCATED),
        sequence(2, 0, 0.0, min_version=4, max_version=4),
        sequence(2, 1, 1.0, response_length=0, status=common.SAMPLE_STATUS_FAILED),
    ]
    found = batch_metrics(batch, step=5)
    assert found["rollout/raw_reward"] == 0.75
    assert found["rollout/response_len/mean"] == 2.5
    assert found["rollout/truncated_ratio"] == found["rollout/failed_ratio"] == 0.25
    assert found["rollout/zero_std/ratio"] == 0.5
    assert found["rollout/policy_lag"] == pytest.approx(1 / 3), "what was never generated has no lag"
