"""Takes jobs from the work queue and reconciles them; asks running jobs for their progress; sweeps
what watches missed.

Everything here is level-triggered: a key in the queue says only that something about the job may
have changed. It knows no Kubernetes: what it needs of a cluster is the protocol `JobCluster`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

import structlog
from structlog.contextvars import bound_contextvars

from sluice.api import KIND, MANAGER, ManifestError, RLJob, RLJobStatus
from sluice.telemetry.planner import advice_for
from sluice_operator import spec_acceptance
from sluice_operator.cluster import errors
from sluice_operator.cluster.protocol import Cluster
from sluice_operator.metrics import CONTROLLER, OperatorMetrics
from sluice_operator.plan import Event, KubeObject, Plan
from sluice_operator.plan.decide.deletion import drain
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import JobKey, uid
from sluice_operator.progress import Prober, key_of
from sluice_operator.reconcile import reconcile
from sluice_operator.settings import OperatorSettings
from sluice_operator.spec_acceptance import accept, parse
from sluice_operator.user_notices import JobNotices, UserNotices
from sluice_operator.work_queue import MAX_SECONDS, WorkQueue

STUCK_SECONDS = 300.0
DRAIN_SECONDS = 2.0
SWEEP_SECONDS = 2.0
FOLLOW_UP_SECONDS = 0.02
STOP_SECONDS = 15.0
CURABLE = (
    errors.ForbiddenError,
    errors.InvalidError,
    errors.MissingApiError,
    errors.ServerFailedError,
    errors.ForeignObjectError,
)
STARTING_SECONDS = 15.0
"""While pods start: why one does not, events say, and those are not watched."""
CURE_SECONDS = 30.0
"""Longest pause after an error that people can cure: they want to see it cured soon."""
FOREIGN_SECONDS = 15.0
"""Between two looks whether another operator still works in a job's namespace."""
IsOurs = Callable[[str], Awaitable[bool]]
ORPHAN = "orphan"
"""Finalizer of `kubectl delete --cascade=orphan`: the pods are to stay, without an owner."""

log = structlog.get_logger(__name__)


class JobCluster(Cluster, Protocol):
    """A cluster with many jobs, as they are stored."""

    def stored(self, key: JobKey) -> KubeObject | None: ...
    def all_keys(self) -> list[JobKey]: ...
    def pods_of(self, stored: KubeObject) -> list[KubeObject]: ...
    def owned(self, stored: KubeObject) -> Mapping[tuple[str, str], KubeObject]: ...
    def forget(self, stored: KubeObject) -> None: ...
    async def release(self, key: JobKey) -> None: ...
    async def config(self, stored: KubeObject) -> KubeObject | None: ...
    async def store_status(self, stored: KubeObject, status: RLJobStatus) -> None: ...
    async def tell(self, stored: KubeObject, events: Sequence[Event]) -> None: ...
    async def resync(self, namespaces: Sequence[str | None]) -> list[KubeObject]: ...


class Controller:
    def __init__(
        self,
        cluster: JobCluster,
        settings: OperatorSettings,
        metrics: OperatorMetrics,
        prober: Prober,
        is_ours: IsOurs | None = None,
    ) -> None:
        """is_ours: whether we may work in a namespace; None: in all."""
        self.cluster, self.settings, self.metrics, self.prober = cluster, settings, metrics, prober
        self._is_ours = is_ours
        self.queue: WorkQueue[JobKey] = WorkQueue(metrics.queue)
        self.leading = False
        self._working: dict[JobKey, float] = {}
        metrics.workers.set(settings.workers)
        metrics.active_workers.set_function(lambda: len(self._working))
        self.teller = UserNotices(cluster)
        self._sweeping: asyncio.Task[None] | None = None
        self._stopping = False

    # -- life
    # ----------------------------------------------------------------------------------------------

    def changed(self, key: JobKey) -> None:
        """Something about the job may have changed. A follower only keeps its memory up to date."""
        if self.leading:
            self.queue.add(key)

    def deleted(self, stored: KubeObject) -> None:
        """The job is gone. Another one of its name may be there already."""
        key = key_of(stored)
        self.cluster.forget(stored)
        self.prober.forget(uid(stored))
        self.teller.forget(stored)
        self.queue.forget(key)
        self.metrics.forget(key)
        self.changed(key)

    async def lead(self) -> None:
        """Work until cancelled.

        The cluster's memory is complete before this is called.
        """
        log.info("leading", identity=self.settings.identity)
        self.leading = True
        self.metrics.leading.labels(self.settings.lease_name).set(1)
        for key in self.cluster.all_keys():
            self.queue.add(key)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.settings.workers):
                group.create_task(self._work_forever())
            group.create_task(self._every(self.settings.probe_seconds, self._probe))
            group.create_task(self._every(self.settings.resync_seconds, self.sweep))

    async def stop(self) -> None:
        """Take no more work; let the passes that run come to their end, for a while."""
        self._stopping, self.leading = True, False
        self.metrics.leading.labels(self.settings.lease_name).set(0)
        end = time.monotonic() + STOP_SECONDS
        while self._working and time.monotonic() < end:
            await asyncio.sleep(0.05)

    def stuck(self) -> str:
        """Why this process should be restarted; empty: it is well."""
        longest = max((time.monotonic() - since for since in self._working.values()), default=0.0)
        return f"a pass has been running for {longest:.0f} s" if longest > STUCK_SECONDS else ""

    def sweep_soon(self) -> None:
        """A watch has read a list anew: it tells what is there, but not what has gone."""
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep_after(SWEEP_SECONDS))

    async def _sweep_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.sweep()

    async def sweep(self) -> None:
        """Find out what has gone while a watch was away."""
        try:
            lost = await self.cluster.resync(self.settings.namespaces or (None,))
        except errors.ApiError as error:
            log.warning("cannot compare with the API server's lists", error=str(error))
            return
        for stored in lost:
            if stored["kind"] == KIND:
                self.deleted(stored)
            else:
                self.changed(
                    (stored["metadata"]["namespace"], stored["metadata"]["labels"][names.LABEL_JOB])
                )
        self._look_again_at_starting()

    def _look_again_at_starting(self) -> None:
        """Pods that do not start may lack an object of the job that somebody deleted, and those are
        not watched.
        """
        for key in self.cluster.all_keys():
            stored = self.cluster.stored(key)
            if stored is not None and any(map(podstate.is_starting, self.cluster.pods_of(stored))):
                self.changed(key)

    async def _probe(self) -> None:
        jobs = [stored for key in self.cluster.all_keys() if (stored := self.cluster.stored(key))]
        for key in await self.prober.ask_all(self.cluster, jobs):
            self.changed(key)

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await work()

    # -- one pass
    # ----------------------------------------------------------------------------------------------

    async def _work_forever(self) -> None:
        while True:
            key = await self.queue.get()
            if self._stopping:
                return
            self._working[key] = start = time.monotonic()
            try:
                with bound_contextvars(job=f"{key[0]}/{key[1]}"):
                    result = await self._attempt(key)
            finally:
                del self._working[key]
                self.queue.done(key)
            self.metrics.reconciles.labels(CONTROLLER, result).inc()
            self.metrics.reconcile_seconds.labels(CONTROLLER).observe(time.monotonic() - start)

    async def _attempt(self, key: JobKey) -> str:
        """One pass, whatever comes of it: how it ended, in controller-runtime's words."""
        try:
            after = await self.reconcile(key)
        except errors.StaleError:
            self.queue.add(key)
            return "requeue"
        except errors.ConflictError as error:
            self.queue.retry(key)
            log.info("somebody else wrote first", error=str(error))
            return "requeue"
        except (errors.ApiError, errors.ForeignObjectError) as error:
            return await self._failed(key, error)
        except Exception as error:
            delay = self.queue.retry(key)
            self.metrics.reconcile_errors.labels(CONTROLLER).inc()
            log.exception("pass failed", again_in=delay)
            if (stored := self.cluster.stored(key)) is not None:
                await self.teller.of_ours(stored, error)
            return "error"
        self.queue.succeeded(key)
        if after is None:
            return "success"
        self.queue.add_after(key, after)
        return "requeue_after"

    async def reconcile(self, key: JobKey) -> float | None:
        """Bring the job one step further; seconds after which to look again,
        None: when something changes.
        """
        stored = self.cluster.stored(key)
        await self.cluster.release(key)
        if stored is None:
            return None
        if self._is_ours is not None and not await self._is_ours(key[0]):
            return FOREIGN_SECONDS
        if stored["metadata"].get("deletionTimestamp"):
            return await self._drain(stored)
        config = await self.cluster.config(stored)
        if config is None and stored["spec"].get("managedBy") not in (None, MANAGER):
            return None
        try:
            accepted = accept(stored, config)
        except ManifestError as error:
            await self.teller.invalid(stored, str(error))
            return None
        if spec_acceptance.is_mended(accepted.job.status):
            await self.cluster.store_status(stored, RLJobStatus())
            return 0.0
        await self.teller.refused(stored, accepted.refused)
        return await self._apply(key, stored, accepted.job, self.teller.told(stored))

    async def _apply(
        self, key: JobKey, stored: KubeObject, job: RLJob, told: JobNotices
    ) -> float | None:
        progress = await self.prober.latest(self.cluster, stored)
        decision = await reconcile(
            self.cluster, job, datetime.now(UTC), progress, self.settings.images, told.note
        )
        self._measure(key, job, decision, told)
        cured = told.cured()
        if not (decision.create or decision.delete or cured):
            starting = any(map(podstate.is_starting, self.cluster.pods_of(stored)))
            return (
                min(STARTING_SECONDS, decision.requeue_after or STARTING_SECONDS)
                if starting
                else decision.requeue_after
            )
        # What was just made may be all that the next step waits for, and not everything is watched.
        return min(
            FOLLOW_UP_SECONDS if decision.create or cured else DRAIN_SECONDS,
            decision.requeue_after or DRAIN_SECONDS,
        )

    def _measure(self, key: JobKey, job: RLJob, decision: Plan, told: JobNotices) -> None:
        info = (job.metadata.uid, job.spec.rollout.engine, job.spec.weight_sync.transport or "")
        self.metrics.show(key, info, decision.status, advice_for(job.spec, decision.status))
        if (
            spec_acceptance.runs_first(job.status, decision.status)
            and decision.status.start_time
            and not told.has_run
        ):
            told.has_run = True
            start = datetime.fromisoformat(decision.status.start_time)
            self.metrics.time_to_running.observe((datetime.now(UTC) - start).total_seconds())
        for event in decision.events:
            log.info("event", reason=event.reason, message=event.message)

    # -- what is not the planner's matter
    # -----------------------------------------------------------------------------

    async def _drain(self, stored: KubeObject) -> float | None:
        """The job is being deleted, and somebody's finalizer keeps it:
        its pods need not wait for that.
        """
        if ORPHAN in stored["metadata"].get("finalizers", []):
            return None
        try:
            job = parse(stored)
        except ManifestError:
            return None  # it never had pods, or the garbage collector takes them
        now = datetime.now(UTC)
        await self.cluster.delete(job, drain(self.cluster.pods_of(stored), now))
        left = self.cluster.pods_of(stored)
        return DRAIN_SECONDS if left else None

    async def _failed(self, key: JobKey, error: errors.ApiError | errors.ForeignObjectError) -> str:
        """The API server did not do what the plan wanted. What people can cure, they are told."""
        self.metrics.reconcile_errors.labels(CONTROLLER).inc()
        curable = isinstance(error, CURABLE)
        at_least = getattr(error, "retry_after", None) or 0.0
        delay = self.queue.retry(key, at_least, CURE_SECONDS if curable else MAX_SECONDS)
        log.warning(
            "API server refused", error=str(error), kind=type(error).__name__, again_in=delay
        )
        if curable and (stored := self.cluster.stored(key)) is not None:
            await self.teller.not_applied(stored, error)
        return "error"
