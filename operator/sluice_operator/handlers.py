"""Watches of jobs, pools and pods, which is all that kopf is used for.

There are only `on.event` handlers, which keep no state in the objects and add no finalizers. They
fill the operator's memory (cluster/kube/store.py) rather than kopf's indices. An index cannot take
the operator's own writes into account, and keeps for ever what vanished while a watch was
interrupted. Indices also doubled the CPU time of a start with 1,100 objects, because each object's
task wakes up whenever another one is done. KubeCluster.prime reads everything before the first
pass. The handlers are coroutines, because kopf runs plain functions in threads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import kopf

from sluice.api import GROUP, PLURAL, VERSION, pool
from sluice_operator.cluster.kube.api import PAGE
from sluice_operator.cluster.kube.cluster import POD_SELECTOR, KubeCluster, job_key, pod_key
from sluice_operator.cluster.kube.engine_pools import pool_of_job, pool_of_pod
from sluice_operator.cluster.kube.kopf_storage import NoDiffs, NoProgress
from sluice_operator.cluster.kube.store import Store
from sluice_operator.controller import Controller
from sluice_operator.plan.facts.model import JobKey, PoolKey

WATCH_SECONDS = 270


class Watches:
    """The memo of the handlers. It has no state, because kopf copies it for each object."""

    def __init__(self, controller: Controller, cluster: KubeCluster) -> None:
        self.controller, self.cluster = controller, cluster

    def job_event(self, kind: str | None, body: kopf.Body) -> None:
        if kind == "DELETED":
            self.controller.deleted({**body})
        else:
            self._notify(job_key(body), kind, self.cluster.jobs.put({**body}))
        # Also after our own writes, by which a job ends: the pool counts jobs that have not ended.
        if (used := pool_of_job(body)) is not None:
            self.controller.changed(used)

    async def pool_event(self, kind: str | None, body: kopf.Body) -> None:
        if kind == "DELETED":
            await self.controller.pool_deleted({**body})
            return
        new = self.cluster.pools.store.put({**body})
        key = PoolKey(*job_key(body))
        self._notify(key, kind, new)
        if new:
            self.controller.pool_changed(key)

    def pod_event(self, kind: str | None, body: kopf.Body) -> None:
        if (key := pod_key(body)) is not None:
            self._notify(key, kind, _remember(self.cluster.pods, kind, body))
        elif (owner := pool_of_pod(body)) is not None:
            new = _remember(self.cluster.pools.pods, kind, body)
            self._notify(PoolKey(*owner), kind, new)

    def _notify(self, key: JobKey | PoolKey, kind: str | None, new: bool) -> None:
        """Tell the controller, unless the event only repeats one of its writes."""
        # Objects of a list have no kind of event. A list is read first, and after an interruption.
        if kind is None:
            self.controller.sweep_soon()
        if new:
            self.controller.changed(key)


def _remember(pods: Store, kind: str | None, body: kopf.Body) -> bool:
    """Store what a watch has reported about a pod. Return True if it is new."""
    return pods.bury({**body}) if kind == "DELETED" else pods.put({**body})


@kopf.on.login()
async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


@kopf.on.event(GROUP, VERSION, PLURAL)
async def job_event(type: str | None, body: kopf.Body, memo: Watches, **_: Any) -> None:  # noqa: A002 - kopf's name
    memo.job_event(type, body)


@kopf.on.event(GROUP, VERSION, pool.PLURAL)
async def pool_event(type: str | None, body: kopf.Body, memo: Watches, **_: Any) -> None:  # noqa: A002 - kopf's name
    await memo.pool_event(type, body)


@kopf.on.event("", "v1", "pods", labels={POD_SELECTOR: kopf.PRESENT})
async def pod_event(type: str | None, body: kopf.Body, memo: Watches, **_: Any) -> None:  # noqa: A002 - kopf's name
    memo.pod_event(type, body)


async def watch(
    watches: Watches, namespaces: Sequence[str], ready: asyncio.Event, stop: asyncio.Event
) -> None:
    """Run kopf until `stop` is set. Without namespaces all of them are watched."""
    await kopf.operator(
        settings=_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        memo=watches,
        ready_flag=ready,
        stop_flag=stop,
    )


class _Patience(Iterable[float]):
    """Seconds between tries, without end.

    Kopf's own list ends after a minute, and the process with it; outages may last longer.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3, 5, 8), itertools.repeat(15))


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # Otherwise kopf posts events, and needs rights for CRDs and namespaces.
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = PAGE
    settings.watching.label_selectors["pods"] = POD_SELECTOR
    settings.watching.reconnect_backoff = 1.0
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _Patience()
    settings.persistence.diffbase_storage = NoDiffs()
    settings.persistence.progress_storage = NoProgress()
    settings.execution.max_workers = 1
    # For so long kopf keeps a task and a whole copy of each object.
    settings.queueing.idle_timeout = 0.1
    return settings
