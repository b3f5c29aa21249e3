"""The controller: takes jobs and pools from the work queue and reconciles them.

It also asks running jobs for their progress, and compares its memory with the cluster from time to
time. Everything is level-triggered: a key in the queue says only that something about the job may
have changed. The controller does not know Kubernetes; the protocol `JobCluster` is what it needs of
a cluster.
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
from sluice.api.pool import KIND as POOL
from sluice.telemetry.planner import advice_for
from sluice_operator import spec_acceptance
from sluice_operator.cluster import errors
from sluice_operator.cluster.protocol import Cluster
from sluice_operator.episode_pods import EXCHANGE_SECONDS, EpisodePodExchange
from sluice_operator.metrics import CONTROLLER, POOL_CONTROLLER, OperatorMetrics
from sluice_operator.plan import Event, KubeObject, Plan
from sluice_operator.plan.decide.deletion import drain
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import JobKey, PoolKey, uid
from sluice_operator.plan.report import remedies
from sluice_operator.pool_reconciler import PoolReconciler
from sluice_operator.progress import Prober, key_of
from sluice_operator.reconcile import reconcile
from sluice_operator.settings import OperatorSettings
from sluice_operator.spec_acceptance import accept, parse
from sluice_operator.user_notices import JobNotices, UserNotices, internal_error
from sluice_operator.work_queue import MAX_SECONDS, WorkQueue

# A pass that runs for longer makes the process unhealthy.
STUCK_SECONDS = 300.0
DRAIN_SECONDS = 2.0
SWEEP_SECONDS = 2.0
FOLLOW_UP_SECONDS = 0.02
STOP_SECONDS = 15.0
# Errors whose cause people can remove.
CURABLE = (
    errors.ForbiddenError,
    errors.InvalidError,
    errors.MissingApiError,
    errors.ServerFailedError,
    errors.ForeignObjectError,
)
# Pause while pods start. Why one does not start is in its events, which are not watched.
STARTING_SECONDS = 15.0
# Longest pause after a curable error, so that people soon see that it is cured.
CURE_SECONDS = 30.0
# Pause between two looks at whether another operator still works in a job's namespace.
FOREIGN_SECONDS = 15.0
MayWorkIn = Callable[[str], Awaitable[bool]]
# Finalizer of `kubectl delete --cascade=orphan`, after which the pods stay without an owner.
ORPHAN = "orphan"

log = structlog.get_logger(__name__)


class JobCluster(Cluster, Protocol):
    """A cluster with many jobs, whose objects are as the API server stores them."""

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
        may_work_in: MayWorkIn | None = None,
        pools: PoolReconciler | None = None,
        episode_pods: EpisodePodExchange | None = None,
    ) -> None:
        """Create a controller that does not lead yet.

        Parameters
        ----------
        cluster
            The jobs and their objects.
        settings, metrics
            Those of the operator.
        prober
            Asks jobs for their progress.
        may_work_in
            Tells whether a namespace belongs to this installation; None if all do.
        pools
            Makes passes over pools; None if the cluster has none.
        episode_pods
            Tells which images episodes wait for; None if no job has rows that name images.

        """
        self.cluster, self.settings, self.metrics, self.prober = cluster, settings, metrics, prober
        self._may_work_in, self._pools = may_work_in, pools
        self._episode_pods = episode_pods
        self.queue: WorkQueue[JobKey | PoolKey] = WorkQueue(metrics.queue)
        self.leading = False
        self._working: dict[JobKey | PoolKey, float] = {}
        metrics.workers.set(settings.workers)
        metrics.active_workers.set_function(lambda: len(self._working))
        self.notices = UserNotices(cluster)
        self._sweeping: asyncio.Task[None] | None = None
        self._stopping = False

    # -- life
    # ----------------------------------------------------------------------------------------------

    def changed(self, key: JobKey | PoolKey) -> None:
        """Enqueue a job or a pool that may have changed."""
        # A follower only keeps its memory up to date.
        if self.leading:
            self.queue.add(key)

    def pool_changed(self, key: PoolKey) -> None:
        """Enqueue a pool whose spec may have changed, and the jobs that use it."""
        self.changed(key)
        if self._pools is not None:
            for job in self._pools.cluster.users(key):
                self.changed(job)

    async def pool_deleted(self, stored: KubeObject) -> None:
        """Forget a pool that is gone, and enqueue the jobs that used it."""
        if self._pools is None:
            return
        self.queue.forget(PoolKey(*key_of(stored)))
        for job in await self._pools.deleted(stored, tell=self.leading):
            self.changed(job)

    def deleted(self, stored: KubeObject) -> None:
        """Forget a job that is gone. Another job of the same name may exist already."""
        key = key_of(stored)
        self.cluster.forget(stored)
        self.prober.forget(uid(stored))
        if self._episode_pods is not None:
            self._episode_pods.forget(uid(stored))
        self.notices.forget(stored)
        self.queue.forget(key)
        self.metrics.forget(key)
        self.changed(key)

    async def lead(self) -> None:
        """Work until cancelled. The cluster's memory has to be complete before this is called."""
        log.info("leading", identity=self.settings.identity)
        self.leading = True
        self.metrics.leading.labels(self.settings.lease_name).set(1)
        for key in self.cluster.all_keys():
            self.queue.add(key)
        for pool in self._pools.cluster.all_keys() if self._pools else ():
            self.queue.add(pool)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.settings.workers):
                group.create_task(self._work_forever())
            group.create_task(self._every(self.settings.probe_seconds, self._probe))
            group.create_task(self._every(self.settings.resync_seconds, self.sweep))
            group.create_task(self._every(EXCHANGE_SECONDS, self._exchange_episode_pods))

    async def stop(self) -> None:
        """Take no more work, and give running passes some time to end."""
        self._stopping, self.leading = True, False
        self.metrics.leading.labels(self.settings.lease_name).set(0)
        end = time.monotonic() + STOP_SECONDS
        while self._working and time.monotonic() < end:
            await asyncio.sleep(0.05)

    def stuck(self) -> str:
        """Return why this process should be restarted; empty if it is healthy."""
        longest = max((time.monotonic() - since for since in self._working.values()), default=0.0)
        return f"a pass has been running for {longest:.0f} s" if longest > STUCK_SECONDS else ""

    def sweep_soon(self) -> None:
        """Schedule a sweep after a watch has read a list: a list does not tell what is gone."""
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep_after(SWEEP_SECONDS))

    async def _sweep_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.sweep()

    async def sweep(self) -> None:
        """Find objects that were deleted while a watch was interrupted."""
        try:
            lost = await self.cluster.resync(self.settings.namespaces or (None,))
        except errors.ApiError as error:
            log.warning("cannot compare with the API server's lists", error=str(error))
            return
        for stored in lost:
            await self._lost(stored)
        self._look_again_at_starting()

    async def _lost(self, stored: KubeObject) -> None:
        """Act on an object whose deletion no watch has reported."""
        if stored["kind"] == KIND:
            self.deleted(stored)
        elif stored["kind"] == POOL:
            await self.pool_deleted(stored)
        else:
            namespace, labels = stored["metadata"]["namespace"], stored["metadata"]["labels"]
            job = labels.get(names.LABEL_JOB)
            self.changed((namespace, job) if job else PoolKey(namespace, labels[names.LABEL_POOL]))

    def _look_again_at_starting(self) -> None:
        """Enqueue jobs with pods that do not start.

        Such a pod may lack an object of the job that was deleted, and these are not watched.
        """
        for key in self.cluster.all_keys():
            stored = self.cluster.stored(key)
            if stored is not None and any(map(podstate.is_starting, self.cluster.pods_of(stored))):
                self.changed(key)

    def _jobs(self) -> list[KubeObject]:
        return [stored for key in self.cluster.all_keys() if (stored := self.cluster.stored(key))]

    async def _exchange_episode_pods(self) -> None:
        if self._episode_pods is not None:
            for key in await self._episode_pods.exchange_all(self.cluster, self._jobs()):
                self.changed(key)

    async def _probe(self) -> None:
        for key in await self.prober.ask_all(self.cluster, self._jobs()):
            self.changed(key)
        for pool in await self._pools.measure() if self._pools else ():
            self.changed(pool)

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
                with bound_contextvars(**_named(key)):
                    result = await self._attempt(key)
            finally:
                del self._working[key]
                self.queue.done(key)
            controller = _controller_of(key)
            self.metrics.reconciles.labels(controller, result).inc()
            self.metrics.reconcile_seconds.labels(controller).observe(time.monotonic() - start)

    async def _attempt(self, key: JobKey | PoolKey) -> str:
        """Make one pass, and return how it ended in controller-runtime's terms."""
        try:
            after = await (
                self._reconcile_pool(key) if isinstance(key, PoolKey) else self.reconcile(key)
            )
        except errors.StaleError:
            self.queue.add(key)
            return "requeue"
        except errors.ConflictError as error:
            self.queue.retry(key)
            log.info("another client wrote first", error=str(error))
            return "requeue"
        except (errors.ApiError, errors.ForeignObjectError) as error:
            return await self._failed(key, error)
        except Exception as error:
            delay = self.queue.retry(key)
            self.metrics.reconcile_errors.labels(_controller_of(key)).inc()
            log.exception("pass failed", again_in=delay)
            await self._report_internal_error(key, error)
            return "error"
        self.queue.succeeded(key)
        if after is None:
            return "success"
        self.queue.add_after(key, after)
        return "requeue_after"

    async def _reconcile_pool(self, key: PoolKey) -> float | None:
        if self._pools is None:
            return None
        if self._may_work_in is not None and not await self._may_work_in(key.namespace):
            return FOREIGN_SECONDS
        return await self._pools.reconcile(key)

    async def reconcile(self, key: JobKey) -> float | None:
        """Make one pass over a job.

        Returns
        -------
        Seconds after which to look again; None if only a change of the job makes that necessary.

        """
        stored = self.cluster.stored(key)
        await self.cluster.release(key)
        if stored is None:
            return None
        if self._may_work_in is not None and not await self._may_work_in(key[0]):
            return FOREIGN_SECONDS
        if stored["metadata"].get("deletionTimestamp"):
            return await self._drain(stored)
        config = await self.cluster.config(stored)
        if config is None and stored["spec"].get("managedBy") not in (None, MANAGER):
            return None
        try:
            accepted = accept(stored, config)
        except ManifestError as error:
            await self.notices.report_invalid_spec(stored, str(error))
            return None
        if spec_acceptance.is_corrected(accepted.job.status):
            await self.cluster.store_status(stored, RLJobStatus())
            return 0.0
        await self.notices.report_refused_change(stored, accepted.refused)
        return await self._apply(key, stored, accepted.job)

    async def _apply(self, key: JobKey, stored: KubeObject, job: RLJob) -> float | None:
        notices = self.notices.of_job(stored)
        progress = await self.prober.latest(self.cluster, stored)
        demands = self._episode_pods.demands(stored) if self._episode_pods else {}
        decision = await reconcile(
            self.cluster,
            job,
            datetime.now(UTC),
            progress,
            self.settings.images,
            notices.note,
            demands,
        )
        self._measure(key, job, decision, notices)
        was_resolved = notices.resolve()
        if not (decision.create or decision.delete or was_resolved):
            starting = any(map(podstate.is_starting, self.cluster.pods_of(stored)))
            return (
                min(STARTING_SECONDS, decision.requeue_after or STARTING_SECONDS)
                if starting
                else decision.requeue_after
            )
        # The next pass may wait only for what was just created, and not everything is watched.
        return min(
            FOLLOW_UP_SECONDS if decision.create or was_resolved else DRAIN_SECONDS,
            decision.requeue_after or DRAIN_SECONDS,
        )

    def _measure(self, key: JobKey, job: RLJob, decision: Plan, notices: JobNotices) -> None:
        info = (job.metadata.uid, job.spec.rollout.engine, job.spec.weight_sync.transport or "")
        self.metrics.show(key, info, decision.status, advice_for(job.spec, decision.status))
        if (
            spec_acceptance.is_first_run(job.status, decision.status)
            and decision.status.start_time
            and not notices.has_run
        ):
            notices.has_run = True
            start = datetime.fromisoformat(decision.status.start_time)
            self.metrics.time_to_running.observe((datetime.now(UTC) - start).total_seconds())
        for event in decision.events:
            log.info("event", reason=event.reason, message=event.message)

    # -- deletion and refusals
    # ----------------------------------------------------------------------------------------------

    async def _drain(self, stored: KubeObject) -> float | None:
        """Delete the pods of a job that is being deleted but that a foreign finalizer keeps."""
        if ORPHAN in stored["metadata"].get("finalizers", []):
            return None
        try:
            job = parse(stored)
        except ManifestError:
            # It never had pods, or the garbage collector deletes them.
            return None
        now = datetime.now(UTC)
        await self.cluster.delete(job, drain(self.cluster.pods_of(stored), now))
        left = self.cluster.pods_of(stored)
        return DRAIN_SECONDS if left else None

    async def _failed(
        self, key: JobKey | PoolKey, error: errors.ApiError | errors.ForeignObjectError
    ) -> str:
        """Retry after the API server refused a write; report it if people can remove the cause."""
        self.metrics.reconcile_errors.labels(_controller_of(key)).inc()
        curable = isinstance(error, CURABLE)
        at_least = getattr(error, "retry_after", None) or 0.0
        delay = self.queue.retry(key, at_least, CURE_SECONDS if curable else MAX_SECONDS)
        log.warning(
            "API server refused", error=str(error), kind=type(error).__name__, again_in=delay
        )
        if not curable:
            return "error"
        if isinstance(key, PoolKey):
            if self._pools is not None:
                await self._pools.report(key, remedies.with_remedy(str(error), remedies.REFUSALS))
        elif (stored := self.cluster.stored(key)) is not None:
            await self.notices.report_not_applied(stored, error)
        return "error"

    async def _report_internal_error(self, key: JobKey | PoolKey, error: Exception) -> None:
        if isinstance(key, PoolKey):
            if self._pools is not None:
                await self._pools.report(key, internal_error(error))
        elif (stored := self.cluster.stored(key)) is not None:
            await self.notices.report_internal_error(stored, error)


def _controller_of(key: JobKey | PoolKey) -> str:
    return POOL_CONTROLLER if isinstance(key, PoolKey) else CONTROLLER


def _named(key: JobKey | PoolKey) -> dict[str, str]:
    """Return the field of log lines that names a job or a pool."""
    if isinstance(key, PoolKey):
        return {"pool": f"{key.namespace}/{key.name}"}
    return {"job": f"{key[0]}/{key[1]}"}
