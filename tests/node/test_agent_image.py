"""The agent in its image (examples/agents/image) learns, each episode in a pod.

    SLUICE_LEARNING_DIR=runs/node STEPS=100 make test-node ARGS='-k agent_image'

keeps metrics.jsonl there, of more steps than the test needs: for the picture in docs/images.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from sluice.telemetry import run_directory
from tests.node.checks import START_SECONDS, STOP_SECONDS
from tests.node.conftest import Prepared
from tests.node.jobs import Quickstart
from tests.node.node import until
from tests.tools import ROOT

pytestmark = pytest.mark.timeout(7200)
AGENTS = ROOT / "examples/agents"
STEPS = int(os.environ.get("STEPS", "30"))
SECONDS_OF_A_STEP = 90
GROUPS, SAMPLES, PODS = 8, 4, 6


class Agent(Quickstart):
    """The example's job, with the node's image and the agent's code from a config map."""

    name, manifest, example = "agent", AGENTS / "image/job.yaml", AGENTS / "openai"

    def environment(self, image: str) -> dict[str, Any]:
        code = {"name": "code", "mountPath": "/app"}
        files = [
            {"key": "agent.py", "path": "openai/agent.py"},
            {"key": "run.py", "path": "image/run.py"},
        ]
        container = {"name": "episode", "volumeMounts": [code], "imagePullPolicy": "Never"}
        volume = {"name": "code", "configMap": {"name": "agent", "items": files}}
        template = {"spec": {"containers": [container], "volumes": [volume]}}
        theirs = self.job()["spec"]["rollout"]["environment"]
        return theirs | {"image": image, "pods": PODS, "template": template}


@pytest.fixture
def agent(prepared: Prepared) -> Agent:
    run = prepared(Agent)
    files = [f"--from-file={AGENTS / 'openai/agent.py'}", f"--from-file={AGENTS / 'image/run.py'}"]
    run.kubectl("create", "configmap", "agent", *files)
    return run


def test_the_agent_learns_in_pods(agent: Agent, image: str, record: Callable[..., None]) -> None:
    rollout = {"batchSize": GROUPS, "samplesPerPrompt": SAMPLES}
    agent.start(
        trainer={"steps": STEPS},
        rollout=rollout | {"environment": agent.environment(image)},
        buffer={"storage": {"size": "1Gi"}},  # the volume that is there for it
    )
    try:
        agent.until_state("Succeeded", START_SECONDS + STEPS * SECONDS_OF_A_STEP)
    finally:
        if kept := os.environ.get("SLUICE_LEARNING_DIR"):
            Path(kept).mkdir(parents=True, exist_ok=True)
            shutil.copy(agent.run / run_directory.METRICS, kept)
    record(agent)
    rewards = [step["rollout/raw_reward"] for step in agent.metrics()]
    assert len(rewards) == STEPS
    assert fmean(rewards[-5:]) > 2 * fmean(rewards[:5]) + 0.1
    counters = agent.counters()
    assert (counters["groups_lost"], counters["groups_trained_twice"]) == (0, 0)
    until(lambda: not agent.pods("episode"), "an end of all episode pods", STOP_SECONDS)
