"""Observe, plan and apply, for one job; and the loop that does so on a laptop.

The order in which a plan is applied makes a crash at any point harmless: the status first (and with
it the next attempt number), then deletions, then creations, and events last.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import structlog

from sluice.api import ConditionType, RLJob, RLJobStatus
from sluice.telemetry import steady
from sluice_operator.cluster.protocol import Cluster, InProcessCluster
from sluice_operator.plan import Images, Observed, Plan, Progress, is_finished, plan
from sluice_operator.plan.decide.reopen import reopened
from sluice_operator.plan.facts import podstate
from sluice_operator.plan.facts.model import NO_DEMANDS, WorkerDemands
from sluice_operator.plan.planner import DEFAULT_IMAGES

POLL_SECONDS = 0.5
PROBE_SECONDS = 1.0
PROBE_DEADLINE = 5.0

AskProgress = Callable[[], Awaitable[Progress | None]]
OnPlan = Callable[[Plan], None]

log = structlog.get_logger(__name__)


async def reconcile(
    cluster: Cluster,
    job: RLJob,
    now: datetime,
    progress: Progress | None = None,
    images: Images = DEFAULT_IMAGES,
    note: str = "",
    demands: WorkerDemands = NO_DEMANDS,
) -> Plan:
    """Make one pass over a job.

    Passes are level-triggered: the next pass does what an interrupted pass has not done.

    Parameters
    ----------
    cluster
        The cluster that runs the job.
    job
        The job as it is reconciled.
    now
        The time of this pass.
    progress
        The job's last known progress.
    images
        Container images of the roles.
    note
        A problem to report in the job's status.
    demands
        Pods that workers wait for.

    """
    observed = replace(await cluster.observe(job), progress=progress, note=note, demands=demands)
    return await _settle(cluster, job, observed, now, images)


async def _settle(
    cluster: Cluster, job: RLJob, observed: Observed, now: datetime, images: Images
) -> Plan:
    decision = plan(job, observed, now, images)
    if decision.status != observed.status:
        await cluster.write_status(job, decision.status)
    if decision.delete:
        await cluster.delete(job, decision.delete)
    if decision.create:
        await cluster.apply(job, decision.create)
    if decision.events:
        await cluster.emit(job, decision.events)
    return decision


async def run_job(
    cluster: InProcessCluster,
    job: RLJob,
    *,
    probe: AskProgress | None = None,
    on_plan: OnPlan | None = None,
    reopen: Sequence[ConditionType] = (),
    images: Images = DEFAULT_IMAGES,
) -> RLJobStatus:
    """Run a job until it has ended and its pods are gone.

    A job with spec.suspend counts as ended. If the call is cancelled, it suspends the job: all pods
    end within their grace periods, and the same call continues later from there. If it is cancelled
    again, it kills them.

    Parameters
    ----------
    cluster
        The cluster that runs the job.
    job
        The job.
    probe
        Asks buffer and rendezvous for the job's progress.
    on_plan
        Called after each pass that changed the status or emitted an event.
    reopen
        Terminal conditions from which the job continues, with new attempts and a fresh budget.
    images
        Container images of the roles.

    Returns
    -------
    The final status.

    """
    stored = (await cluster.observe(job)).status
    if stored is not None and any(map(stored.is_true, reopen)):
        await cluster.write_status(job, reopened(stored, steady.now()))
    async with _probing(probe) as latest:
        loop = _Loop(cluster, job, latest, on_plan, images)
        try:
            return await loop.until_stopped()
        except asyncio.CancelledError:
            await loop.stop()
            raise


class _Loop:
    def __init__(
        self,
        cluster: InProcessCluster,
        job: RLJob,
        latest: _Latest,
        on_plan: OnPlan | None,
        images: Images,
    ) -> None:
        self.cluster, self.job, self.latest, self.on_plan, self.images = (
            cluster,
            job,
            latest,
            on_plan,
            images,
        )
        self.status: RLJobStatus | None = None

    async def until_stopped(self) -> RLJobStatus:
        """Reconcile until the job is finished or suspended and no pod runs."""
        while True:
            observed = await self.cluster.observe(self.job)
            observed = replace(observed, progress=await self._progress(observed))
            decision = await _settle(self.cluster, self.job, observed, steady.now(), self.images)
            if self.on_plan and (decision.status != self.status or decision.events):
                self.on_plan(decision)
            self.status = decision.status
            ended = is_finished(decision.status) or decision.status.is_true("Suspended")
            if ended and not await self._is_anything_running():
                return decision.status
            due = decision.requeue_after if decision.requeue_after is not None else POLL_SECONDS
            await self.cluster.changed(min(due, POLL_SECONDS))

    async def stop(self) -> None:
        """End the run at the user's wish, as if the job were suspended."""
        self.job = self.job.model_copy(
            update={"spec": self.job.spec.model_copy(update={"suspend": True})}
        )
        self.latest.progress = None
        try:
            await self.until_stopped()
        except asyncio.CancelledError:
            self.cluster.kill()
            raise

    async def _progress(self, observed: Observed) -> Progress | None:
        """Return the last answer.

        After the trainer's end the job is asked once more, because the buffer ends in this pass.
        """
        latest, over = self.latest, observed.status is not None and is_finished(observed.status)
        ended = any(
            podstate.role(pod) == "trainer" and podstate.succeeded(pod) for pod in observed.pods
        )
        if latest.probe and ended and not over:
            latest.progress = await _ask(latest.probe) or latest.progress
        return latest.progress

    async def _is_anything_running(self) -> bool:
        observed = await self.cluster.observe(self.job)
        return not all(podstate.is_finished(pod) for pod in observed.pods)


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Cancel the current task on each SIGINT, SIGTERM and SIGHUP (the end of the terminal)."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@dataclass
class _Latest:
    probe: AskProgress | None
    progress: Progress | None = None


@contextlib.asynccontextmanager
async def _probing(probe: AskProgress | None) -> AsyncIterator[_Latest]:
    """Ask in the background, so that a probe that hangs does not delay a restart."""
    latest = _Latest(probe)
    if probe is None:
        yield latest
        return
    task = asyncio.create_task(_probe_forever(probe, latest))
    try:
        yield latest
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _probe_forever(probe: AskProgress, latest: _Latest) -> None:
    while True:
        latest.progress = await _ask(probe)
        await asyncio.sleep(PROBE_SECONDS)


async def _ask(probe: AskProgress) -> Progress | None:
    """Return the answer, or None if the probe fails.

    The buffer may be starting, restarting or gone; the state of its pod tells which.
    """
    try:
        async with asyncio.timeout(PROBE_DEADLINE):
            return await probe()
    except Exception as error:
        log.debug("probe failed", error=repr(error))
        return None
