"""The quickstart in real pods: it learns, survives what clusters do to pods, and leaves no
object behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from sluice_operator.plan.facts.constants import GRACE
from tests.node.checks import START_SECONDS, STOP_SECONDS, check_sound
from tests.node.conftest import OPERATOR_NAMESPACE, RELEASE
from tests.node.jobs import NAME, Quickstart
from tests.node.node import Node, until
from tests.tools import tool

pytestmark = pytest.mark.timeout(2400)


def test_the_installed_chart_passes_its_own_test(operator: None, node: Node) -> None:
    """`helm test`, which asks the operator whether it watches."""
    node.call(
        str(tool("helm")),
        "test",
        RELEASE,
        "--namespace",
        OPERATOR_NAMESPACE,
        "--timeout",
        "3m",
        seconds=200,
    )


def test_a_user_applies_watches_and_deletes_it(
    quickstart: Quickstart, record: Callable[..., None]
) -> None:
    before = quickstart.objects()
    quickstart.start(trainer={"steps": 40})
    quickstart.until_step(3, START_SECONDS)
    quickstart.until(lambda: quickstart.status().get("state") == "Running", "state Running", 60)
    row = quickstart.row()
    assert list(row) == [
        "NAME",
        "STATE",
        "STEP",
        "REWARD",
        "LAG",
        "ROLLOUTS",
        "VERSION",
        "RESTARTS",
        "AGE",
    ]
    assert (row["NAME"], row["STATE"], row["ROLLOUTS"], row["RESTARTS"]) == (
        NAME,
        "Running",
        "1",
        "0",
    )
    assert int(row["STEP"]) >= 1
    early = float(row["REWARD"])
    waited = quickstart.kubectl(
        "wait", "--for=condition=Succeeded", "--timeout=500s", f"rljob/{NAME}", seconds=510
    )
    assert waited.strip() == f"rljob.sluice.dev/{NAME} condition met"
    check_sound(quickstart, 40)
    assert float(quickstart.row()["REWARD"]) > early
    assert "TrainerSucceeded" in quickstart.reasons()
    record(quickstart)
    quickstart.delete()
    until(lambda: quickstart.objects() == before, f"only {before} left", 240)


def test_a_job_that_is_deleted_while_its_engine_starts_leaves_before_its_grace_is_over(
    quickstart: Quickstart,
) -> None:
    """A container's first process ignores SIGTERM unless it has a handler."""
    before = quickstart.objects()
    quickstart.start()
    quickstart.until(lambda: running(quickstart, "engine"), "an engine that starts", START_SECONDS)
    quickstart.delete()
    until(lambda: not quickstart.pods(), "no pod left", GRACE["rollout"] - 20)
    until(lambda: quickstart.objects() == before, f"only {before} left", STOP_SECONDS)


def running(run: Quickstart, container: str) -> bool:
    """True if this container of a rollout pod runs."""
    statuses = [
        s for pod in run.pods("rollout") for s in pod["status"].get("containerStatuses", [])
    ]
    return any(s["name"] == container and "running" in s["state"] for s in statuses)


def test_faults(quickstart: Quickstart, node: Node, record: Callable[..., None]) -> None:
    """A rollout pod is deleted, the trainer killed, its pod removed by force, the leading
    operator's pod deleted, the buffer's pod deleted, and the job suspended and resumed: one after
    the other, within one run."""
    steps = 120
    quickstart.start(
        trainer={"steps": steps},
        checkpoint={"everySteps": 5},
        failurePolicy={"rolloutBackoffSeconds": 1},
    )
    quickstart.until_step(4, START_SECONDS)
    quickstart.replace("rollout")
    quickstart.until_step(15, START_SECONDS)
    quickstart.kill("trainer", "sluice_trainer")
    quickstart.until(lambda: quickstart.status()["restarts"] == 1, "a restart that counts", 120)
    failure = quickstart.status()["lastFailure"]
    assert (failure["role"], failure["container"], failure["exitCode"]) == (
        "trainer",
        "trainer",
        137,
    )
    quickstart.until_step(30, START_SECONDS)
    quickstart.replace("trainer", "--grace-period=0", "--force")
    quickstart.until_step(45, START_SECONDS)
    restart_leader(node)
    quickstart.until_step(60, START_SECONDS)
    quickstart.replace("buffer")
    quickstart.until_step(80, START_SECONDS)
    quickstart.patch(suspend=True)
    quickstart.until_state("Suspended", STOP_SECONDS)
    quickstart.until(lambda: not quickstart.pods(), "an end of all pods", STOP_SECONDS)
    reached = quickstart.step()
    assert reached < steps
    quickstart.patch(suspend=False)
    quickstart.until_state("Succeeded", START_SECONDS + STOP_SECONDS)
    check_sound(quickstart, steps)
    assert quickstart.status()["restarts"] == 1, "deletions are no failures of the job's"
    assert {
        "GangRestarting",
        "GangDisrupted",
        "Suspended",
        "Resumed",
        "TrainerSucceeded",
    } <= quickstart.reasons()
    record(quickstart)


def restart_leader(node: Node) -> None:
    """Delete the pod of the operator that has the lease; until another one has it."""
    where = ("-n", OPERATOR_NAMESPACE)
    leader = holder(node)
    node.kubectl(*where, "delete", "pod", leader, "--timeout=60s", seconds=90)
    until(lambda: holder(node) not in ("", leader), "another leader", 120)


def holder(node: Node) -> str:
    return str(
        node.get("-n", OPERATOR_NAMESPACE, "lease", RELEASE)["spec"].get("holderIdentity") or ""
    )


def test_an_image_that_cannot_be_pulled_shows_in_the_status(quickstart: Quickstart) -> None:
    containers = [{"name": "trainer", "image": "localhost/nothing:1"}]
    quickstart.start(trainer={"steps": 2, "template": {"spec": {"containers": containers}}})

    def message() -> str:
        text = str(quickstart.condition("Running").get("message", ""))
        return text if "localhost/nothing:1" in text else ""

    text = quickstart.until(message, "words about the image", 240)
    assert re.search(r"quickstart-trainer-0-1-0 \(trainer\): (ErrImagePull|ImagePullBackOff)", text)
    assert "check the image's name" in text
    assert quickstart.row_state() == "Pending"
    assert quickstart.status()["lastFailure"]["container"] == "trainer"


def test_a_trainer_without_memory_fails_with_words(quickstart: Quickstart) -> None:
    containers: list[dict[str, Any]] = [
        {"name": "trainer", "resources": {"limits": {"memory": "128Mi"}}}
    ]
    quickstart.start(
        trainer={"steps": 2, "template": {"spec": {"containers": containers}}},
        failurePolicy={"maxRestarts": 0},
    )
    status = until(
        lambda: s if (s := quickstart.status()).get("state") == "Failed" else {},
        "state Failed",
        240,
    )
    failure = status["lastFailure"]
    assert (failure["role"], failure["reason"], failure["exitCode"]) == (
        "trainer",
        "OOMKilled",
        137,
    )
    message = quickstart.condition("Failed")["message"]
    assert "OOMKilled" in message
    assert "SIGKILL" in message
