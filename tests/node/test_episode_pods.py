"""Each episode a pod, on a real node: they play, hang, die and are reaped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.telemetry import run_directory
from tests.node.checks import START_SECONDS, STOP_SECONDS
from tests.node.jobs import Quickstart
from tests.node.node import until

pytestmark = pytest.mark.timeout(2400)
STEPS, GROUPS, SAMPLES, PODS, HANGS_AT = 6, 4, 4, 4, 5
AGENT = Path(__file__).with_name("agent.py")


def environment(image: str) -> dict[str, Any]:
    """The agent's code comes as a config map; its image is the one that is there."""
    mount = {"name": "agent", "mountPath": "/agent"}
    container = {"name": "episode", "volumeMounts": [mount], "imagePullPolicy": "Never"}
    volume = {"name": "agent", "configMap": {"name": "agent"}}
    return {
        "image": image,
        "command": ["python", "/agent/agent.py"],
        "env": {"HANGS_AT": str(HANGS_AT)},
        "pods": PODS,
        "template": {"spec": {"containers": [container], "volumes": [volume]}},
    }


def samples(run: Quickstart) -> list[dict[str, Any]]:
    files = sorted((run.run / "samples").glob("*.jsonl"))
    return [sample for file in files for sample in run_directory.records(file)]


def test_episodes_are_pods(quickstart: Quickstart, image: str, record: Callable[..., None]) -> None:
    """One hangs and costs its sample, one is lost and costs nothing."""
    quickstart.kubectl("create", "configmap", "agent", f"--from-file={AGENT}")
    quickstart.start(
        trainer={"steps": STEPS},
        rollout={
            "batchSize": GROUPS,
            "samplesPerPrompt": SAMPLES,
            "functionSeconds": 20,
            "environment": environment(image),
        },
        evaluation=None,
    )
    quickstart.until(lambda: len(quickstart.pods("episode")) >= PODS, "a warm pool", START_SECONDS)
    quickstart.until_step(3, START_SECONDS)
    victim = quickstart.pods("episode")[0]["metadata"]["name"]
    quickstart.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
    quickstart.until_state("Succeeded", 3 * START_SECONDS)
    record(quickstart)
    until(lambda: not quickstart.pods("episode"), "an end of all episode pods", STOP_SECONDS)
    counters = quickstart.counters()
    assert (counters["groups_lost"], counters["groups_trained_twice"]) == (0, 0)
    assert counters["groups_trained"] == STEPS * GROUPS
    (failed,) = (sample for sample in samples(quickstart) if sample["status"] == "failed")
    assert (failed["group_id"], failed["index"]) == (HANGS_AT, 0)
    assert "took more than 20 s outside of the engine" in failed["error"]
