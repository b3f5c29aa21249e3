"""Passes over pools: what is written, what is reported, and when the next pass is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sluice.api import RLEnginePool, RLEnginePoolStatus, manifest
from sluice_operator import settings
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.controller import Controller
from sluice_operator.metrics import OperatorMetrics
from sluice_operator.plan import Deletion, Event, Images, KubeObject
from sluice_operator.plan.facts.model import JobKey, PoolKey
from sluice_operator.plan.pool import PoolObserved
from sluice_operator.pool_reconciler import LOOK_SECONDS, STARTING_SECONDS, PoolReconciler
from sluice_operator.progress import Prober
from tests.unit.operator.pool_world import engine_pod, make_pool
from tests.unit.operator.test_controller import Jobs
from tests.unit.operator.world import make_job

KEY = PoolKey("default", "shared")
USER = ("default", "demo")


class OnePool:
    """The pool `shared`, without a cluster. error: what the next application raises."""

    def __init__(self) -> None:
        self.document: KubeObject | None = manifest(make_pool())
        self.document["metadata"] |= {"namespace": "default", "generation": 1}
        self.observed = PoolObserved()
        self.error: Exception | None = None
        self.told: list[Event] = []
        self.jobs: list[JobKey] = []

    def stored(self, key: PoolKey) -> KubeObject | None:
        return self.document if key == KEY else None

    def all_keys(self) -> list[PoolKey]:
        return [KEY] if self.document else []

    def pods_of(self, key: PoolKey) -> list[KubeObject]:
        return list(self.observed.pods)

    def users(self, key: PoolKey) -> list[JobKey]:
        return self.jobs

    def forget(self, stored: KubeObject) -> None:
        self.document = None

    async def observe(self, pool: RLEnginePool) -> PoolObserved:
        return self.observed

    async def store_status(self, stored: KubeObject, status: RLEnginePoolStatus) -> None:
        assert self.document is not None
        self.document = {**self.document, "status": manifest(status)}

    async def apply(self, pool: RLEnginePool, objects: Sequence[KubeObject]) -> None:
        if self.error is not None:
            raise self.error
        made = {(made["kind"], made["metadata"]["name"]): made for made in objects}
        self.observed = replace(self.observed, objects={**self.observed.objects, **made})

    async def delete(self, pool: RLEnginePool, deletions: Sequence[Deletion]) -> None:
        gone = {(deletion.kind, deletion.name) for deletion in deletions}
        left = {key: made for key, made in self.observed.objects.items() if key not in gone}
        self.observed = replace(self.observed, objects=left)

    async def tell(self, stored: KubeObject, events: Sequence[Event]) -> None:
        self.told += events

    @property
    def message(self) -> str:
        assert self.document is not None
        return str(self.document["status"]["conditions"][0]["message"])

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.told]


@pytest.fixture
def pool() -> OnePool:
    return OnePool()


@pytest.fixture
def controller(pool: OnePool) -> Controller:
    made = Controller(
        Jobs(make_job()),
        settings.read({}),
        OperatorMetrics(),
        Prober(JobKeys(bytes(32))),
        pools=PoolReconciler(pool, Images()),
    )
    made.leading = True
    return made


async def passes(controller: Controller, count: int) -> list[str]:
    return [await controller._attempt(KEY) for _ in range(count)]


async def test_objects_are_made_once(controller: Controller, pool: OnePool) -> None:
    await passes(controller, 1)
    made = dict(pool.observed.objects)
    assert len(made) == 5
    await passes(controller, 2)
    assert pool.observed.objects == made
    assert pool.message == "0 of 2 engines answer"


async def test_a_pool_is_looked_at_more_often_until_its_engines_answer(pool: OnePool) -> None:
    reconciler = PoolReconciler(pool, Images())
    await reconciler.reconcile(KEY)
    assert await reconciler.reconcile(KEY) == STARTING_SECONDS
    pool.observed = replace(pool.observed, pods=(engine_pod(0), engine_pod(1)))
    assert await reconciler.reconcile(KEY) == LOOK_SECONDS


async def test_a_refusal_is_reported_until_it_is_cured(
    controller: Controller, pool: OnePool
) -> None:
    pool.error = errors.ForbiddenError("exceeded quota: gpus, requested: pods=1")
    assert await passes(controller, 3) == ["error", "error", "error"]
    assert pool.reasons == ["ApplyFailed"]
    assert "have ResourceQuota gpus raised" in pool.message
    pool.error = None
    await passes(controller, 2)
    assert pool.message == "0 of 2 engines answer"


async def test_an_internal_error_is_reported(controller: Controller, pool: OnePool) -> None:
    pool.error = RuntimeError("a bug")
    assert await passes(controller, 2) == ["error", "error"]
    assert "the operator has an internal error" in pool.message
    assert "RuntimeError: a bug" in pool.message


async def test_an_invalid_pool_is_told_once_and_makes_nothing(
    controller: Controller, pool: OnePool
) -> None:
    assert pool.document is not None
    pool.document["spec"]["maxRank"] = 0
    await passes(controller, 2)
    assert pool.reasons == ["InvalidSpec"]
    assert "spec.maxRank: expected at least 1, found 0" in pool.message
    assert not pool.observed.objects


async def test_fields_of_another_version_are_ignored(controller: Controller, pool: OnePool) -> None:
    assert pool.document is not None
    pool.document["spec"]["later"] = True
    await passes(controller, 1)
    assert pool.observed.objects


async def test_a_changed_pool_enqueues_the_jobs_that_use_it(
    controller: Controller, pool: OnePool
) -> None:
    pool.jobs = [USER]
    controller.pool_changed(KEY)
    assert {await controller.queue.get(), await controller.queue.get()} == {KEY, USER}


async def test_a_deleted_pool_is_told_and_enqueues_the_jobs_that_used_it(
    controller: Controller, pool: OnePool
) -> None:
    pool.jobs = [USER]
    assert pool.document is not None
    await controller.pool_deleted(pool.document)
    assert pool.reasons == ["DeletedInUse"]
    assert await controller.queue.get() == USER
    assert pool.document is None


async def test_a_follower_tells_nothing(controller: Controller, pool: OnePool) -> None:
    controller.leading = False
    pool.jobs = [USER]
    assert pool.document is not None
    await controller.pool_deleted(pool.document)
    assert (pool.reasons, len(controller.queue)) == ([], 0)
