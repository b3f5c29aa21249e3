"""A real server of OpenEnv next to an engine, on a real node: it pays for episodes, it is killed,
and its image is missing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.node import openenv_image
from tests.node.checks import START_SECONDS, STOP_SECONDS
from tests.node.conftest import Prepared, loaded
from tests.node.jobs import Quickstart
from tests.node.node import Node, Object, until
from tests.node.openenv_image import SERVER
from tests.node.test_agent_image import Agent
from tests.node.test_episode_pods import samples
from tests.node.test_pod_security import inside
from tests.pod_security import violations
from tests.tools import missing

pytestmark = pytest.mark.timeout(2400)
STEPS, GROUPS, SAMPLES = 30, 8, 4
PYTHON = Path(
    os.environ.get("SLUICE_OPENENV_PYTHON") or Path(sys.prefix).parent / ".venv-openenv/bin/python"
)


@pytest.fixture(scope="module")
def server(node: Node, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The server's image, in the node."""
    if not PYTHON.exists():
        missing("needs OpenEnv: make agents")
    write = partial(openenv_image.write, python=PYTHON)
    return loaded(node, openenv_image.name(PYTHON), write, tmp_path_factory)


@pytest.fixture
def copying(prepared: Prepared) -> Quickstart:
    """The agent's model and questions, for they have a chat template; the server's code."""
    run = prepared(Agent)
    file = Path(__file__).with_name(openenv_image.FILE)
    run.kubectl("create", "configmap", "environment", f"--from-file={file}")
    return run


def start(run: Quickstart, openenv: Object, **container: Any) -> None:
    """Without a reward of the job's: the server gives it. container: fields of the server's."""
    mount = {"name": "environment", "mountPath": openenv_image.DIRECTORY}
    ours = {"name": "openenv", "volumeMounts": [mount], "imagePullPolicy": "IfNotPresent"}
    volume = {"name": "environment", "configMap": {"name": "environment"}}
    run.start(
        trainer={"steps": STEPS},
        rollout={
            "batchSize": GROUPS,
            "samplesPerPrompt": SAMPLES,
            "environment": {"openenv": openenv},
            "template": {"spec": {"containers": [ours | container], "volumes": [volume]}},
        },
        reward=None,
        buffer={"storage": {"size": "1Gi"}},  # the volume that is there for it
        failurePolicy={"rolloutBackoffSeconds": 1},
    )


def running_message(run: Quickstart, words: str, what: str) -> str:
    """The message of `Running`, once it says this."""

    def message() -> str:
        text = str(run.condition("Running").get("message", ""))
        return text if re.search(words, text) else ""

    return str(run.until(message, what, 240))


def test_a_server_in_the_engines_pod_pays_and_is_killed(
    copying: Quickstart, server: str, record: Callable[..., None]
) -> None:
    before = copying.objects()
    start(copying, {"image": server})
    copying.until_step(3, START_SECONDS)
    pod = copying.pod("rollout")
    assert violations(pod, "restricted") == []
    status = inside(copying, "rollout", "openenv", "cat /proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert set(fields["Uid"].split()) == {"65532"}, "its image says root"
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    copying.kill("rollout", SERVER)
    words = running_message(copying, "openenv", "words about the server")
    assert words.endswith("agent-rollout-0-1-0: openenv: killed by SIGKILL")
    failure = copying.status()["lastFailure"]
    assert (failure["role"], failure["container"], failure["exitCode"]) == (
        "rollout",
        "openenv",
        137,
    )
    events = copying.kubectl("get", "events", "--field-selector", "reason=GangRestarting")
    assert "rollout-0 failed: openenv: killed by SIGKILL; attempt 2 starts in 1 s" in events
    assert re.search(r"agent-rollout-0-1-0, container\s+openenv", status_of(copying))
    copying.until_state("Succeeded", 3 * START_SECONDS)
    record(copying)
    counters = copying.counters()
    assert (counters["groups_lost"], counters["groups_trained_twice"]) == (0, 0)
    assert counters["groups_trained"] == STEPS * GROUPS
    played = samples(copying)
    assert {sample["reward"] for sample in played} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert [sample for sample in played if sample["status"] == "failed"] == []
    rewards = [step["rollout/raw_reward"] for step in copying.metrics()]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.1
    copying.until_drained()
    kept = before | {f"persistentvolumeclaim/{copying.status()['checkpointClaim']}"}
    copying.delete()
    until(lambda: copying.objects() == kept, f"only {kept} left", STOP_SECONDS)


def status_of(run: Quickstart) -> str:
    """The text of `sluice status`."""
    words = ("-m", "sluice_cli", "status", run.name, "--namespace", run.namespace)
    return run.node.call(sys.executable, *words)


def test_a_servers_image_that_cannot_be_pulled_shows_in_the_status(copying: Quickstart) -> None:
    start(copying, {"image": "localhost/nothing:1"})
    words = running_message(copying, "localhost/nothing:1", "words about the image")
    assert re.search(r"agent-rollout-0-1-0 \(openenv\): (ErrImagePull|ImagePullBackOff)", words)
    assert "check the image's name" in words
    assert copying.row_state() == "Pending"
    assert copying.status()["lastFailure"]["container"] == "openenv"
    assert "localhost/nothing:1" in status_of(copying)


def test_a_server_that_cannot_start_is_told_in_its_own_words(
    copying: Quickstart, server: str
) -> None:
    start(copying, {"image": server}, command=["python", "/nothing.py"])
    words = running_message(copying, "rollout-0-2-0", "the end of a second server")
    assert "openenv: python: can't open file '/nothing.py'" in words


def test_a_port_on_which_no_server_listens_is_told(copying: Quickstart, server: str) -> None:
    start(copying, {"image": server, "timeoutSeconds": 5}, command=["sleep", "3600"])
    words = running_message(copying, "the server has not listened", "words about the port")
    assert "agent-rollout-0-1-0: worker: spec.rollout.environment.openenv: nothing" in words
    assert "127.0.0.1:8000 in this pod for 5 s: see the log of the container openenv" in words
