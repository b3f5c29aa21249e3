"""Makes passes over RLEnginePools: observe, plan and apply, as reconcile.py does for jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

import structlog

from sluice.api import ManifestError, RLEnginePool, RLEnginePoolStatus
from sluice_operator.plan import Event, Images, KubeObject
from sluice_operator.plan.facts import podstate
from sluice_operator.plan.facts.model import Deletion, JobKey, PoolKey, uid
from sluice_operator.plan.pool import (
    PoolObserved,
    PoolPlan,
    deleted_in_use,
    invalid_status,
    plan_pool,
)
from sluice_operator.spec_acceptance import NOT_APPLIED, parse_pool
from sluice_operator.token_meter import TokenMeter

# Pause while engines are not ready. Why one does not start may be in events, which are not watched.
STARTING_SECONDS = 15.0
# Pause after objects were created or changed, or after a problem was solved.
FOLLOW_UP_SECONDS = 0.02
# Pause between two looks at objects of a pool, which are not watched.
LOOK_SECONDS = 300.0

log = structlog.get_logger(__name__)


class PoolCluster(Protocol):
    """The pools of a cluster, and their objects."""

    def stored(self, key: PoolKey) -> KubeObject | None: ...
    def all_keys(self) -> list[PoolKey]: ...
    def pods_of(self, key: PoolKey) -> list[KubeObject]: ...
    def users(self, key: PoolKey) -> list[JobKey]: ...
    def forget(self, stored: KubeObject) -> None: ...
    async def observe(self, pool: RLEnginePool) -> PoolObserved: ...
    async def store_status(self, stored: KubeObject, status: RLEnginePoolStatus) -> None: ...
    async def apply(self, pool: RLEnginePool, objects: Sequence[KubeObject]) -> None: ...
    async def delete(self, pool: RLEnginePool, deletions: Sequence[Deletion]) -> None: ...
    async def tell(self, stored: KubeObject, events: Sequence[Event]) -> None: ...


class PoolReconciler:
    def __init__(
        self, cluster: PoolCluster, images: Images, meter: TokenMeter | None = None
    ) -> None:
        self.cluster, self._images, self._meter = cluster, images, meter or TokenMeter()
        # Refusals of the API server and internal errors, by the uid of the pool.
        self._problems: dict[str, str] = {}

    async def reconcile(self, key: PoolKey) -> float | None:
        """Make one pass over a pool, and return the seconds after which to look again."""
        stored = self.cluster.stored(key)
        if stored is None:
            return None
        now = datetime.now(UTC)
        try:
            pool = parse_pool(stored)
        except ManifestError as error:
            status, event = invalid_status(stored, str(error), now)
            if status != _status_of(stored):
                await self.cluster.store_status(stored, status)
                await self.cluster.tell(stored, [event])
            return None
        observed = replace(
            await self.cluster.observe(pool),
            tokens_per_second=self._meter.rate(key),
            note=self._problems.get(uid(stored), ""),
        )
        decision = plan_pool(pool, observed, now, self._images)
        await self._carry_out(pool, stored, decision)
        solved = self._problems.pop(uid(stored), "")
        if decision.create or decision.delete or solved:
            return FOLLOW_UP_SECONDS
        ready = len(observed.pods) >= pool.spec.replicas and all(
            map(podstate.is_ready, observed.pods)
        )
        pause = LOOK_SECONDS if ready else STARTING_SECONDS
        return pause if decision.requeue_after is None else min(pause, decision.requeue_after)

    async def _carry_out(self, pool: RLEnginePool, stored: KubeObject, decision: PoolPlan) -> None:
        """Write the status, delete, create, and tell what has changed."""
        if decision.status != pool.status:
            await self.cluster.store_status(stored, decision.status)
        if decision.delete:
            await self.cluster.delete(pool, decision.delete)
        if decision.create:
            await self.cluster.apply(pool, decision.create)
        for event in decision.events:
            log.info("event", reason=event.reason, message=event.message)
        if decision.events:
            await self.cluster.tell(stored, decision.events)

    async def report(self, key: PoolKey, problem: str) -> None:
        """Report why a pass has failed, in an event and with the next pass in the status."""
        stored = self.cluster.stored(key)
        if stored is None or self._problems.get(uid(stored)) == problem:
            return
        self._problems[uid(stored)] = problem
        await self.cluster.tell(stored, [Event("Warning", NOT_APPLIED, problem)])

    async def deleted(self, stored: KubeObject, *, tell: bool) -> list[JobKey]:
        """Forget a pool that is gone, and return the jobs that used it.

        tell: whether to report it in an event.
        """
        key = PoolKey(stored["metadata"]["namespace"], stored["metadata"]["name"])
        self.cluster.forget(stored)
        self._problems.pop(uid(stored), None)
        users = self.cluster.users(key)
        # A pool whose deletion waited for its objects has had a pass since.
        if users and tell and not stored["metadata"].get("deletionTimestamp"):
            await self.cluster.tell(stored, [deleted_in_use([name for _, name in users])])
        return users

    async def measure(self) -> list[PoolKey]:
        """Ask the engines how much they generate, and return the pools whose rate has changed."""
        return await self._meter.measure(
            {key: self.cluster.pods_of(key) for key in self.cluster.all_keys()}
        )


def _status_of(stored: KubeObject) -> RLEnginePoolStatus | None:
    status = stored.get("status")
    return RLEnginePoolStatus.model_validate(status) if status else None
