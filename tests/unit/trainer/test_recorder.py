"""Metrics of a batch, from the metadata of its sequences."""

from __future__ import annotations

import pytest

from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.recorder import batch_metrics


def sequence(group: int, index: int, reward: float, **fields: object) -> pb.Sequence:
    values = {"length": 7, "response_length": 2, "trainable_tokens": 2, "status": common.SAMPLE_STATUS_COMPLETED}
    return pb.Sequence(group_id=group, index=index, reward=reward, **{**values, **fields})


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
