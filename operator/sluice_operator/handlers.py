"""Watches, by kopf, and nothing else.

Only `on.event` handlers: they keep no state in the objects and add no finalizers. They fill our own
memory (cluster/kube/store.py) instead of kopf's indices: those cannot be told of our own writes,
keep for ever what vanished while a watch was away, and doubled the CPU of a start with 1,100
objects, since each object's task wakes up whenever another one is done. What indices would be for
here, KubeCluster.prime does: nothing is planned before all is known. The handlers are coroutines:
kopf runs plain functions in threads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import kopf

from sluice.api import GROUP, PLURAL, VERSION
from sluice_operator.cluster.kube.api import PAGE
from sluice_operator.cluster.kube.cluster import POD_SELECTOR, KubeCluster, job_key, pod_key
from sluice_operator.cluster.kube.kopf_storage import NoDiffs, NoProgress
from sluice_operator.controller import Controller
from sluice_operator.plan.facts.model import JobKey

WATCH_SECONDS = 270


class Watches:
    """The handlers' kopf memo. Kopf copies it for each object: it must hold no state of its own."""

    def __init__(self, controller: Controller, cluster: KubeCluster) -> None:
        self.controller, self.cluster = controller, cluster

    def job_event(self, kind: str | None, body: kopf.Body) -> None:
        if kind == "DELETED":
            self.controller.deleted({**body})
        else:
            self._seen(job_key(body), kind, self.cluster.jobs.put({**body}))

    def pod_event(self, kind: str | None, body: kopf.Body) -> None:
        key, pods = pod_key(body), self.cluster.pods
        if key is not None:
            self._seen(key, kind, pods.bury({**body}) if kind == "DELETED" else pods.put({**body}))

    def _seen(self, key: JobKey, kind: str | None, news: bool) -> None:
        """kind: None in a list, the first one or one after a watch was away. An echo of our own
        write is no news.
        """
        if kind is None:
            self.controller.sweep_soon()
        if news:
            self.controller.changed(key)


@kopf.on.login()
async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


@kopf.on.event(GROUP, VERSION, PLURAL)
async def job_event(type: str | None, body: kopf.Body, memo: Watches, **_: Any) -> None:  # noqa: A002 - kopf's name
    memo.job_event(type, body)


@kopf.on.event("", "v1", "pods", labels={POD_SELECTOR: kopf.PRESENT})
async def pod_event(type: str | None, body: kopf.Body, memo: Watches, **_: Any) -> None:  # noqa: A002 - kopf's name
    memo.pod_event(type, body)


async def watch(
    watches: Watches, namespaces: Sequence[str], ready: asyncio.Event, stop: asyncio.Event
) -> None:
    """Run kopf until `stop`. Namespaces: those to watch; none: all of them."""
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
    """Seconds between tries. Kopf's own list ends after a minute, and the process with it; outages
    may last longer.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3, 5, 8), itertools.repeat(15))


def _settings() -> kopf.OperatorSettings:
    """Without this kopf would post events,
    and ask for rights that it does not need (CRDs, namespaces).
    """
    settings = kopf.OperatorSettings()
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
    settings.queueing.idle_timeout = (
        0.1  # kopf keeps a task and the last whole copy of each object for so long
    )
    return settings
