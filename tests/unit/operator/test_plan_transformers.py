"""The pods of a job whose engine is transformers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sluice_operator.plan.decide.gangs import desired_gangs
from sluice_operator.plan.facts.model import Images
from sluice_operator.plan.manifests.pods import gang_pods
from tests.unit.operator.world import make_job


def engine(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first engine's pod, and its container."""
    rollout = {"engine": "transformers", "gpusPerReplica": 1, **changes.pop("rollout", {})}
    job = make_job(**changes | {"rollout": rollout})
    gang = next(g for g in desired_gangs(job) if g.role == "rollout")
    [pod] = gang_pods(job, gang, 1, "rendezvous:1", Images())
    containers = {c["name"]: c for c in pod["spec"]["containers"]}
    return dict(pod), dict(containers["engine"])


def test_the_engine_is_the_trainers_image_and_needs_no_plugin() -> None:
    pod, container = engine()
    assert container["image"] == Images().trainer
    assert container["command"] == ["python", "-m", "sluice.engines.transformers.server"]
    words = " ".join(container["args"])
    assert "--device cuda" in words
    assert "--dtype bfloat16" in words
    assert "--draw-weights" in container["args"]
    assert "plugin" not in {c["name"] for c in pod["spec"].get("initContainers", [])}


def test_engine_args_are_the_servers() -> None:
    _, container = engine(rollout={"engineArgs": {"maxRunningRequests": 8, "dtype": "float32"}})
    words = " ".join(container["args"])
    assert "--max-running-requests 8" in words
    assert "--dtype float32" in words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"gpusPerReplica": 2}}, "computes on a CPU or on one GPU"),
        ({"trainer": {"routingReplay": "rollout"}}, "choose rollout.engine sglang"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        engine(**changes)
