"""The controller: what it does with every way in which a pass can end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from sluice.api import RLJob, RLJobStatus, manifest
from sluice_operator import settings
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.controller import Controller
from sluice_operator.metrics import OperatorMetrics
from sluice_operator.plan import Deletion, Event, KubeObject, Observed
from sluice_operator.progress import Prober
from tests.unit.operator.world import World, make_job

KEY = ("default", "demo")


class Jobs:
    """A single job without a cluster. error: what the next application of a plan raises."""

    def __init__(self, job: RLJob) -> None:
        self.world = World(job)
        self.error: Exception | None = None
        self.reported: list[Event] = []
        self.document: KubeObject | None = manifest(job)
        self.document["metadata"] |= {"namespace": "default", "uid": "1234", "generation": 1}
        self.accepted: KubeObject | None = None
        self.lost: list[KubeObject] = []

    def stored(self, key: Any) -> KubeObject | None:
        if self.document is None or key != KEY:
            return None
        return {**self.document, **({"status": self.world.stored} if self.world.stored else {})}

    async def release(self, key: Any) -> None:
        """It has no pods of jobs that are gone."""

    def all_keys(self) -> list[tuple[str, str]]:
        return [KEY] if self.document else []

    def pods_of(self, stored: KubeObject) -> list[KubeObject]:
        return list(self.world.pods.values())

    def owned(self, stored: KubeObject) -> Mapping[tuple[str, str], KubeObject]:
        return {}

    def forget(self, stored: KubeObject) -> None:
        self.document = None

    async def config(self, stored: KubeObject) -> KubeObject | None:
        return self.world.objects.get(("ConfigMap", "demo-config"))

    async def store_status(self, stored: KubeObject, status: RLJobStatus) -> None:
        self.world.stored = manifest(status)

    async def tell(self, stored: KubeObject, events: Sequence[Event]) -> None:
        self.reported += events

    async def resync(self, namespaces: Sequence[str | None]) -> list[KubeObject]:
        return self.lost

    async def observe(self, job: RLJob) -> Observed:
        return Observed(tuple(self.world.pods.values()), self.world.objects, job.status)

    async def write_status(self, job: RLJob, status: RLJobStatus) -> None:
        self.world.stored = manifest(status)

    async def apply(self, job: RLJob, objects: Sequence[KubeObject]) -> None:
        if self.error is not None:
            raise self.error
        for body in objects:
            self.world._create(body)

    async def delete(self, job: RLJob, deletions: Sequence[Deletion]) -> None:
        for deletion in deletions:
            self.world._delete(deletion.name, deletion.grace)

    async def emit(self, job: RLJob, events: Sequence[Event]) -> None:
        self.reported += events


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(make_job(rollout={"replicas": 1}, startupDeadlineSeconds=0))


@pytest.fixture
def controller(jobs: Jobs) -> Controller:
    return Controller(jobs, settings.read({}), OperatorMetrics(), Prober(JobKeys(bytes(32))))


async def settle(controller: Controller, passes: int = 12) -> list[str]:
    """Pass after pass, as workers would; how each ended."""
    controller.leading = True
    return [await controller._attempt(KEY) for _ in range(passes)]


async def test_passes_go_on_until_nothing_is_left_to_do(controller: Controller, jobs: Jobs) -> None:
    results = await settle(controller, 4)
    assert results == ["requeue_after", "requeue_after", "success", "success"]
    assert len(jobs.world.pods) == 4


@pytest.mark.parametrize(
    ("error", "result", "reported"),
    [
        (errors.ThrottledError("slow down", 429, 7), "error", False),
        (errors.UnavailableError("no answer"), "error", False),
        (errors.ServerFailedError("failed calling webhook", 500), "error", True),
        (errors.ForbiddenError("exceeded quota", 403), "error", True),
        (errors.InvalidError("spec.containers[0].image: required", 422), "error", True),
        (errors.ForeignObjectError("demo-config belongs to somebody else"), "error", True),
        (errors.ConflictError("changed", 409), "requeue", False),
        (errors.StaleError("changed"), "requeue", False),
    ],
    ids=[
        "throttled",
        "unavailable",
        "webhook is down",
        "forbidden",
        "invalid",
        "foreign object",
        "conflict",
        "stale",
    ],
)
async def test_no_error_stops_the_operator_and_people_hear_of_what_they_can_cure(
    controller: Controller, jobs: Jobs, error: Exception, result: str, reported: bool
) -> None:
    jobs.error = error
    assert await settle(controller, 3) == [result] * 3
    assert [event.reason for event in jobs.reported] == (["ApplyFailed"] if reported else [])
    jobs.error = None
    await settle(controller)
    assert len(jobs.world.pods) == 4


async def test_trouble_shows_in_the_status_until_it_is_over(
    controller: Controller, jobs: Jobs
) -> None:
    jobs.error = errors.ForbiddenError("exceeded quota", 403)
    await settle(controller, 3)
    assert _message(jobs).endswith("; exceeded quota")
    jobs.error = None
    await settle(controller)
    assert "quota" not in _message(jobs)


async def test_a_webhook_that_was_down_is_tried_again_within_30_seconds(
    controller: Controller, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []
    monkeypatch.setattr(controller.queue, "add_after", lambda key, delay: delays.append(delay))
    jobs.error = errors.ServerFailedError("failed calling webhook", 500)
    await settle(controller, 14)
    assert max(delays) == 30


async def test_an_error_of_ours_is_told_before_anything_is_started(
    controller: Controller, jobs: Jobs
) -> None:
    jobs.config = broken  # type: ignore[method-assign]
    assert await settle(controller, 3) == ["error"] * 3
    assert [event.reason for event in jobs.reported] == ["ReconcileFailed"]
    assert "KeyError: 'path' (controller.py:" in jobs.reported[0].message
    status = RLJobStatus.model_validate(jobs.world.stored)
    condition = status.condition("Running")
    assert condition is not None
    assert (condition.status, condition.reason, status.state) == (
        "Unknown",
        "ReconcileFailed",
        "Pending",
    )
    assert condition.message == f"no pod has been created; {jobs.reported[0].message}"
    del jobs.config
    await settle(controller)
    assert "KeyError" not in _message(jobs)
    assert len(jobs.world.pods) == 4


async def test_an_error_of_ours_leaves_the_rest_of_the_status_as_it_was(
    controller: Controller, jobs: Jobs
) -> None:
    await settle(controller)
    before, words = RLJobStatus.model_validate(jobs.world.stored), _message(jobs)
    for key in ("path", "other"):  # another message of the same error is not told again
        jobs.config = partial(broken, key=key)  # type: ignore[method-assign]
        assert await settle(controller, 2) == ["error"] * 2
    after = RLJobStatus.model_validate(jobs.world.stored)
    assert _message(jobs) == f"{words}; {jobs.reported[-1].message}"
    assert len(jobs.reported) == 1
    others = [condition for condition in before.conditions if condition.type != "Running"]
    assert [condition for condition in after.conditions if condition.type != "Running"] == others
    assert after.reason == "ReconcileFailed"
    assert (
        after.model_copy(update={"conditions": before.conditions, "reason": before.reason})
        == before
    )


async def test_an_error_that_cannot_be_told_is_told_later(
    controller: Controller, jobs: Jobs
) -> None:
    jobs.config, store = broken, jobs.store_status  # type: ignore[method-assign]

    async def refuse(stored: KubeObject, status: RLJobStatus) -> None:
        raise errors.ConflictError("changed", 409)

    jobs.store_status = refuse  # type: ignore[method-assign]
    assert await settle(controller, 2) == ["error"] * 2
    assert jobs.reported == []
    jobs.store_status = store  # type: ignore[method-assign]
    await settle(controller, 1)
    assert [event.reason for event in jobs.reported] == ["ReconcileFailed"]


async def test_a_throttling_server_is_given_the_time_that_it_asks_for(
    controller: Controller, jobs: Jobs
) -> None:
    jobs.error = errors.ThrottledError("slow down", 429, 0.2)
    await settle(controller, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(controller.queue.get(), 0.15)
    assert await asyncio.wait_for(controller.queue.get(), 1) == KEY


async def test_a_job_of_another_manager_is_not_touched(jobs: Jobs) -> None:
    jobs = Jobs(make_job(managedBy="other.dev/controller"))
    controller = Controller(jobs, settings.read({}), OperatorMetrics(), Prober(JobKeys(bytes(32))))
    assert await settle(controller, 2) == ["success"] * 2
    assert jobs.world.stored is None
    assert jobs.world.objects == {}


async def test_a_refusal_is_told_once(controller: Controller, jobs: Jobs) -> None:
    await settle(controller)
    assert jobs.document is not None
    jobs.document["spec"]["trainer"]["steps"] = 99
    await settle(controller)
    assert [event.reason for event in jobs.reported] == ["SpecChangeRefused"]
    assert "spec change refused" in _message(jobs)


async def test_a_deleted_job_leaves_no_metrics(controller: Controller, jobs: Jobs) -> None:
    await settle(controller)
    assert _sample(controller, "rljob_info") == 1
    assert jobs.document is not None
    controller.deleted(jobs.document)
    assert _sample(controller, "rljob_info") is None
    assert await settle(controller, 1) == ["success"]


async def test_what_a_sweep_finds_lost_is_looked_at(controller: Controller, jobs: Jobs) -> None:
    await settle(controller)
    while controller.queue:
        controller.queue.done(await controller.queue.get())
    pod = next(iter(jobs.world.pods.values()))
    jobs.lost = [{**pod, "metadata": pod["metadata"] | {"namespace": "default"}}]
    await controller.sweep()
    assert await asyncio.wait_for(controller.queue.get(), 1) == KEY


async def test_a_follower_works_on_nothing(controller: Controller) -> None:
    controller.changed(KEY)
    assert len(controller.queue) == 0


async def test_a_new_leader_takes_up_what_he_has_watched(
    controller: Controller, jobs: Jobs
) -> None:
    controller.changed(KEY)
    leading = asyncio.create_task(controller.lead())
    async with asyncio.timeout(5):
        while len(jobs.world.pods) < 4:
            await asyncio.sleep(0.01)
    await controller.stop()
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading


async def broken(stored: KubeObject, key: str = "path") -> KubeObject | None:
    """An unexpected error in a pass."""
    raise KeyError(key)


def _message(jobs: Jobs) -> str:
    status = RLJobStatus.model_validate(jobs.world.stored)
    condition = status.condition("Running")
    assert condition is not None
    return condition.message


def _sample(controller: Controller, name: str) -> float | None:
    labels = {
        "namespace": "default",
        "name": "demo",
        "uid": "1234",
        "engine": "sglang",
        "transport": "",
    }
    return controller.metrics.registry.get_sample_value(name, labels)
