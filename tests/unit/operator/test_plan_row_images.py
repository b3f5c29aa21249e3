"""Pods of episodes whose images the rows name: one for each episode that waits for its image."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.plan import KubeObject, Observed, Plan, plan
from sluice_operator.plan.facts.model import WorkerDemand, WorkerDemands
from tests.unit.operator.test_plan_episodes import agent_job, engine, episode
from tests.unit.operator.world import START

ENVIRONMENT: dict[str, Any] = {"image": "{metadata.image}", "allowedImages": ["me/"], "pods": 3}
WORKER = (0, 1)


def row_pod(index: int, image: str, number: int = 1, **fields: Any) -> KubeObject:
    pod = episode(index, number, **fields)
    pod["metadata"]["annotations"] = {"sluice.dev/row-image": image}
    return pod


def demand(*waiting: tuple[str, int], joined: tuple[str, ...] = ()) -> WorkerDemands:
    images = tuple(("episode", image, count) for image, count in waiting)
    return {WORKER: WorkerDemand(images, frozenset(joined))}


def planned(
    demands: WorkerDemands, *pods: KubeObject, environment: dict[str, Any] | None = None
) -> Plan:
    job = agent_job(ENVIRONMENT | (environment or {}))
    return plan(job, Observed(pods, operator_namespace="sluice", demands=demands), START)


def created(decided: Plan) -> list[tuple[str, str]]:
    """Return slot and number, and the image, of each pod."""
    return [
        (pod["metadata"]["name"].partition("episode-0-1-")[2], containers["episode"]["image"])
        for pod in decided.create
        if pod["kind"] == "Pod" and "-episode-" in pod["metadata"]["name"]
        for containers in [{c["name"]: c for c in pod["spec"]["containers"]}]
    ]


FIRST = "demo-episode-0-1-0-1"


@pytest.mark.parametrize(
    ("demands", "pods", "expected"),
    [
        pytest.param({}, [], [], id="nothing is known yet"),
        pytest.param(demand(), [], [], id="no episode waits"),
        pytest.param(demand(("me/a", 1)), [], [("0-1", "me/a")], id="one"),
        pytest.param(
            demand(("me/a", 2), ("me/b", 2)),
            [],
            [("0-1", "me/a"), ("1-1", "me/a"), ("2-1", "me/b")],
            id="at most the engine's number",
        ),
        pytest.param(
            demand(("me/a", 2)),
            [row_pod(0, "me/a", phase="Pending")],
            [("1-1", "me/a")],
            id="one is coming",
        ),
        pytest.param(
            demand(("me/a", 1)),
            [row_pod(0, "me/a")],
            [],
            id="one has started and not joined yet",
        ),
        pytest.param(
            demand(("me/a", 1), joined=(FIRST,)),
            [row_pod(0, "me/a")],
            [("1-1", "me/a")],
            id="another episode has it",
        ),
        pytest.param(
            demand(("me/a", 1)),
            [row_pod(0, "me/b")],
            [("1-1", "me/a")],
            id="another image is coming",
        ),
        pytest.param(
            demand(("me/a", 1)),
            [row_pod(0, "me/a", 4, phase="Succeeded")],
            [("0-5", "me/a")],
            id="one has ended",
        ),
    ],
)
def test_each_waiting_episode_gets_a_pod(
    demands: WorkerDemands, pods: list[KubeObject], expected: list[tuple[str, str]]
) -> None:
    assert created(planned(demands, engine(), *pods)) == expected


@pytest.mark.parametrize(
    ("demands", "pod", "expected"),
    [
        pytest.param(demand(), row_pod(0, "me/a", phase="Pending"), [FIRST], id="pending"),
        pytest.param(demand(("me/a", 1)), row_pod(0, "me/a", phase="Pending"), [], id="waited for"),
        pytest.param({}, row_pod(0, "me/a", phase="Pending"), [], id="nothing is known"),
        pytest.param(demand(), row_pod(0, "me/a"), [], id="it has started"),
        pytest.param(
            demand(joined=(FIRST,)), row_pod(0, "me/a", phase="Pending"), [], id="it has joined"
        ),
    ],
)
def test_a_pod_that_no_episode_waits_for_goes_before_it_starts(
    demands: WorkerDemands, pod: KubeObject, expected: list[str]
) -> None:
    decided = planned(demands, engine(), pod)
    assert [item.name for item in decided.delete if "-episode-" in item.name] == expected


def test_two_hundred_images_fill_the_slots_in_their_order() -> None:
    waiting = [(f"me/{number}", 1) for number in range(200)]
    images = [image for _, image in created(planned(demand(*waiting), engine()))]
    assert images == ["me/0", "me/1", "me/2"]


def test_the_sidecar_tells_the_image_to_the_worker() -> None:
    (pod,) = (
        pod
        for pod in planned(demand(("me/a:1", 1)), engine()).create
        if pod["kind"] == "Pod" and "-episode-" in pod["metadata"]["name"]
    )
    containers = {container["name"]: container for container in pod["spec"]["containers"]}
    assert {"name": "SLUICE_IMAGE", "value": "me/a:1"} in containers["sidecar"]["env"]
    assert pod["metadata"]["annotations"] == {"sluice.dev/row-image": "me/a:1"}


@pytest.mark.parametrize(
    ("image", "expected"), [("me/judge:1", ["me/judge:1"] * 4), (None, [])], ids=["own", "row's"]
)
def test_verifiers_have_the_image_of_the_row_or_of_the_job(
    image: str | None, expected: list[str]
) -> None:
    verifier = {"command": ["judge"], **({"image": image} if image else {})}
    decided = planned(demand(), engine(), environment={"verifier": verifier})
    pods = [pod for pod in decided.create if "-verifier-" in pod["metadata"]["name"]]
    assert [pod["spec"]["containers"][0]["image"] for pod in pods] == expected


def test_a_verifier_of_the_row_is_created_on_demand() -> None:
    demands = {WORKER: WorkerDemand((("verifier", "me/a", 1),))}
    verifier = {"command": ["judge"]}
    decided = planned(demands, engine(), environment={"verifier": verifier})
    (pod,) = (pod for pod in decided.create if "-verifier-" in pod["metadata"]["name"])
    assert pod["spec"]["containers"][0]["image"] == "me/a"
