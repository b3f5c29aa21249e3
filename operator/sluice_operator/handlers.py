"""Watches, by kopf, and nothing else.

Only `on.event` and `index` handlers: they keep no state in the objects and add no finalizers. The index handlers fill
our own memory (cluster/store.py) instead of kopf's: kopf runs them for the whole first list before it calls any event
handler, so that no job is planned before all its pods are known; but its own indices cannot be told of our writes, and
keep for ever what vanished while a watch was away. All handlers are coroutines: kopf runs plain functions in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import kopf

from sluice.api import GROUP, PLURAL, VERSION
from sluice_operator.cluster.kube.cluster import POD_SELECTOR, KubeCluster, job_key, pod_key
from sluice_operator.cluster.store import Key, Store
from sluice_operator.controller import Controller

WATCH_SECONDS = 270
RELIST_PAUSE = 2.0


class Watches:
    """What the handlers share, as kopf's memo: the controller, and its cluster's memory."""

    def __init__(self, controller: Controller, cluster: KubeCluster) -> None:
        self.controller, self.cluster = controller, cluster
        self._news: set[Key] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._sweeping: set[asyncio.Task[None]] = set()

    def take(self, store: Store, key: Key | None, body: kopf.Body) -> None:
        """Remember the object. An echo of our own write is no news."""
        found = {**body, "metadata": dict(body["metadata"])}
        if store.put(found) and key is not None:
            self._news.add(key)

    def job_event(self, key: Key, kind: str | None, body: kopf.Body) -> None:
        if kind == "DELETED":
            self.controller.deleted({**body})
        else:
            self._told(key, kind)

    def pod_event(self, key: Key | None, kind: str | None, body: kopf.Body) -> None:
        gone = kind == "DELETED" and self.cluster.pods.bury({**body})
        if key is not None and gone:
            self._news.add(key)
        if key is not None:
            self._told(key, kind)

    def _told(self, key: Key, kind: str | None) -> None:
        """kind: None in a list, the first one or one after a watch was away for too long."""
        if kind is None and self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(RELIST_PAUSE, self._start_sweep)
        if key in self._news:
            self._news.discard(key)
            self.controller.changed(key)

    def _start_sweep(self) -> None:
        """A list says what there is, not what has gone."""
        self._sweep = None
        task = asyncio.create_task(self.controller.sweep())
        self._sweeping.add(task)
        task.add_done_callback(self._sweeping.discard)


@kopf.on.login()
async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


@kopf.index(GROUP, VERSION, PLURAL, id="jobs")
async def index_job(body: kopf.Body, memo: Watches, **_: Any) -> None:
    memo.take(memo.cluster.jobs, job_key(body), body)


@kopf.index("", "v1", "pods", id="pods", labels={POD_SELECTOR: kopf.PRESENT})
async def index_pod(body: kopf.Body, memo: Watches, **_: Any) -> None:
    memo.take(memo.cluster.pods, pod_key(body), body)


@kopf.on.event(GROUP, VERSION, PLURAL)
async def job_event(type: str | None, body: kopf.Body, memo: Watches, **_: Any) -> None:  # noqa: A002 - kopf's name
    memo.job_event(job_key(body), type, body)


@kopf.on.event("", "v1", "pods", labels={POD_SELECTOR: kopf.PRESENT})
async def pod_event(type: str | None, body: kopf.Body, memo: Watches, **_: Any) -> None:  # noqa: A002 - kopf's name
    memo.pod_event(pod_key(body), type, body)


async def watch(watches: Watches, namespaces: Sequence[str], ready: asyncio.Event, stop: asyncio.Event) -> None:
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


def _settings() -> kopf.OperatorSettings:
    """Without this kopf would post events, and ask for rights that it does not need (CRDs, namespaces)."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    settings.watching.label_selectors["pods"] = POD_SELECTOR
    settings.networking.request_timeout = 30
    settings.execution.max_workers = 1
    return settings
