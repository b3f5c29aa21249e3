"""Each episode a pod, on a real node: they play, hang, die and are reaped; and pods of a verifier
judge them.
"""

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
STEPS, GROUPS, SAMPLES, PODS, HANGS_AT = 4, 4, 4, 4, 5
AGENT, JUDGE = (Path(__file__).with_name(name) for name in ("agent.py", "judge.py"))


def environment(image: str) -> dict[str, Any]:
    """The programs' code comes as a config map; their image is the one that is there."""
    mount = {"name": "agent", "mountPath": "/agent"}
    volume = {"name": "agent", "configMap": {"name": "agent"}}

    def template(name: str) -> dict[str, Any]:
        container = {"name": name, "volumeMounts": [mount], "imagePullPolicy": "Never"}
        return {"spec": {"containers": [container], "volumes": [volume]}}

    return {
        "image": image,
        "command": ["python", "/agent/agent.py"],
        "env": {"HANGS_AT": str(HANGS_AT)},
        "pods": PODS,
        "template": template("episode"),
        "verifier": {
            "command": ["python", "/agent/judge.py"],
            "pods": PODS // 2,
            "template": template("verifier"),
        },
    }


def samples(run: Quickstart) -> list[dict[str, Any]]:
    files = sorted((run.run / "samples").glob("*.jsonl"))
    return [sample for file in files for sample in run_directory.records(file)]


def test_episodes_are_pods(quickstart: Quickstart, image: str, record: Callable[..., None]) -> None:
    """A pod that hangs costs its sample; a pod that is lost does not."""
    files = [f"--from-file={file}" for file in (AGENT, JUDGE)]
    quickstart.kubectl("create", "configmap", "agent", *files)
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
    until(
        lambda: not (quickstart.pods("episode") or quickstart.pods("verifier")),
        "an end of all pods of episodes",
        STOP_SECONDS,
    )
    counters = quickstart.counters()
    assert (counters["groups_lost"], counters["groups_trained_twice"]) == (0, 0)
    assert counters["groups_trained"] == STEPS * GROUPS
    played = samples(quickstart)
    (failed,) = (sample for sample in played if sample["status"] == "failed")
    assert (failed["group_id"], failed["index"]) == (HANGS_AT, 0)
    assert "took more than 20 s outside of the engine" in failed["error"]
    rewards = {sample["reward"] for sample in played if sample is not failed}
    assert rewards == {0.25}, "the verifier's"
