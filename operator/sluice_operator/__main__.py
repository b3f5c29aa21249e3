"""The operator's process: watches, waits for the lease, and reconciles.

It exits with code 0 on SIGTERM and with 1 if the lease is lost. A leader that loses the lease exits
rather than becoming a follower: a fresh process cannot have work of an earlier term in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import structlog

from sluice.telemetry import endpoints, logs
from sluice_operator import handlers, settings
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube import Api, KubeCluster, Lease, elect, operatorkey
from sluice_operator.cluster.kube.lease import Timing
from sluice_operator.cluster.kube.namespace_lock import ALWAYS, NamespaceLocks
from sluice_operator.cluster.kube.paths import RLJOBS
from sluice_operator.controller import Controller
from sluice_operator.episode_pods import EpisodePodExchange
from sluice_operator.metrics import OperatorMetrics
from sluice_operator.pool_reconciler import PoolReconciler
from sluice_operator.progress import Prober
from sluice_operator.settings import OperatorSettings

AGAIN_SECONDS = 2.0
T = TypeVar("T")

log = structlog.get_logger(__name__)


async def main() -> int:
    config = settings.read(arguments=sys.argv[1:])
    logs.configure("operator", identity=config.identity)
    metrics = OperatorMetrics()
    stop = asyncio.Event()
    _stop_on_signals(stop)
    async with await Api.connect(metrics.request) as api:
        controller: Controller | None = None
        locks: NamespaceLocks | None = None
        ready = asyncio.Event()

        pulse = endpoints.LoopWatchdog()

        def is_stuck() -> str:
            return pulse.check() or (controller.stuck() if controller else "")

        def is_ready() -> str:
            return "not watching yet" if locks is None or not ready.is_set() else locks.refusal

        async with AsyncExitStack() as stack:
            await stack.enter_async_context(pulse.running())
            _, close = endpoints.listen(
                config.http_port,
                config.bind,
                ready=is_ready,
                alive=is_stuck,
                registry=metrics.registry,
            )
            stack.callback(close)
            cluster = await _until_either(_open(api, config), stop)
            if cluster is None:
                return 0
            locks = NamespaceLocks(
                api, f"{config.namespace}/{config.lease_name}", cluster.namespaces
            )
            controller = Controller(
                cluster,
                config,
                metrics,
                Prober(cluster.keys),
                locks.may_work_in,
                PoolReconciler(cluster.pools, config.images),
                EpisodePodExchange(cluster.keys),
            )
            return await _run(api, cluster, controller, locks, ready, stop)


async def _run(
    api: Api,
    cluster: KubeCluster,
    controller: Controller,
    locks: NamespaceLocks,
    ready: asyncio.Event,
    stop: asyncio.Event,
) -> int:
    """Watch and lead until `stop` is set, then finish running passes and hand the lease over."""
    config, timing = controller.settings, Timing(controller.settings.lease_seconds)
    watches = handlers.Watches(controller, cluster)
    unwatch = asyncio.Event()
    lease = Lease(api, config.namespace, config.lease_name, config.identity, timing)
    leading: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def lead() -> None:
        # The election ignores how this ends, so the error is passed on through `leading`.
        try:
            await locks.settle(config.namespaces or (ALWAYS,))
            async with asyncio.TaskGroup() as group:
                group.create_task(locks.keep())
                group.create_task(controller.lead())
        except Exception as error:
            leading.set_exception(error)

    watching = asyncio.create_task(handlers.watch(watches, config.namespaces, ready, unwatch))
    electing = asyncio.create_task(elect(lease, timing, lead))
    taking_back = asyncio.create_task(_take_signals_back(ready, stop))
    stopping = asyncio.create_task(stop.wait())
    ends: set[asyncio.Future[Any]] = {watching, electing, stopping, leading}
    ended, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping")
    taking_back.cancel()
    await controller.stop()
    electing.cancel()
    await asyncio.wait({electing})
    if stopping in ended:
        await lease.release()
    unwatch.set()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait({watching}, timeout=10)
    for task in ended - {stopping}:
        if task.exception() is not None:
            log.error("stopped by an error", exc_info=task.exception())
    return 0 if stopping in ended else 1


async def _open(api: Api, config: OperatorSettings) -> KubeCluster:
    """Return the cluster, with the operator's key and with all jobs, pools and pods read.

    Waits for an API server that serves RLJobs.
    """
    keys = await _patiently(
        lambda: operatorkey.read_or_make(api, config.namespace, config.key_secret),
        "the operator's key",
    )
    await _patiently(lambda: api.get(RLJOBS), "an API server that serves RLJobs")
    cluster = KubeCluster(api, config.identity, keys, config.namespace, config.job_defaults)
    await _patiently(
        lambda: cluster.prime(config.namespaces or (None,)), "the lists of jobs, pools and pods"
    )
    return cluster


async def _patiently(call: Callable[[], Awaitable[T]], what: str) -> T:
    """Try until the API server answers; a missing right or CRD may come later."""
    logged = ""
    while True:
        try:
            return await call()
        except errors.ApiError as error:
            if str(error) != logged:
                logged = str(error)
                log.warning(f"waiting for {what}", error=logged)
            await asyncio.sleep(AGAIN_SECONDS)


async def _until_either(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the work's result; None if `stop` is set first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    return None


def _stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _take_signals_back(ready: asyncio.Event, stop: asyncio.Event) -> None:
    """Replace the signal handlers that kopf installs at its start.

    Watches have to end last, after the passes and the lease.
    """
    await ready.wait()
    _stop_on_signals(stop)


if __name__ == "__main__":
    logs.run("operator", main)
