"""The number of GPUs that a job needs at the least to begin on one machine."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api import RLJob
from sluice_operator.cluster.local import gpus
from sluice_operator.plan.manifests.render import render_all

SPEC: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"prompts": [{"path": "p"}]},
    "reward": {"type": "f1"},
    "checkpoint": {},
}


@pytest.mark.parametrize(
    ("trainer", "rollout", "expected"),
    [
        ({}, {}, 2),
        ({"gpusPerNode": 0}, {"gpusPerReplica": 0}, 0),
        ({"gpusPerNode": 2, "nodes": 2}, {"gpusPerReplica": 2, "replicas": 8}, 6),
        ({"gpusPerNode": 2}, {"gpusPerReplica": 2, "replicas": 0}, 2),
        ({"gpusPerNode": 1, "colocate": True}, {"gpusPerReplica": 1}, 1),
        ({"gpusPerNode": 2, "colocate": True}, {"gpusPerReplica": 1}, 2),
    ],
    ids=str,
)
def test_one_engine_is_enough_to_begin(
    trainer: dict[str, Any], rollout: dict[str, Any], expected: int
) -> None:
    spec = SPEC | {"trainer": {"steps": 1} | trainer, "rollout": rollout}
    if rollout.get("replicas") == 0:
        spec |= {"debug": {"replay": "dump"}}
    job = RLJob.model_validate({"metadata": {"name": "x"}, "spec": spec})
    assert gpus.required_by(render_all(job)) == expected
