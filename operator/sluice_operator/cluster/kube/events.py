"""Kubernetes events: those of the operator about jobs and pools, those of kubelets about pods."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import structlog

from sluice.api import API_VERSION, KIND
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.model import Event, JobKey, KubeletWarning, KubeObject, uid

NOTE_LIMIT = 1024
REPORTER = "sluice.dev/operator"
_number = itertools.count()


def event_object(stored: KubeObject, event: Event, identity: str) -> KubeObject:
    """Return an event about a job or a pool as an object of events.k8s.io/v1.

    identity: this replica of the operator.
    """
    metadata = stored["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    regarding = {
        "apiVersion": API_VERSION,
        "kind": stored.get("kind", KIND),
        "namespace": namespace,
        "name": name,
        "uid": uid(stored),
    }
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{time.time_ns() + next(_number):x}", "namespace": namespace},
        "eventTime": clock.micro_text(datetime.now(UTC)),
        "reportingController": REPORTER,
        "reportingInstance": identity,
        "action": "Reconcile",
        "type": event.type,
        "reason": event.reason,
        "note": event.message[:NOTE_LIMIT],
        "regarding": regarding,
    }


async def post(api: Api, stored: KubeObject, events: Sequence[Event], identity: str) -> None:
    """Create events. One that is refused must not stop a job, because events are for people."""
    for event in events:
        try:
            body = event_object(stored, event, identity)
            await api.create(collection("Event", stored["metadata"]["namespace"]), body)
        except errors.ApiError as error:
            log.warning("event refused", reason=event.reason, error=str(error))


# Time for a pod to start before its events are read, and the greatest age of what was read.
PATIENCE_SECONDS, AGAIN_SECONDS = 5.0, 15.0
# Reasons of events about containers and scheduling, for which the pod's status says more.
_IN_STATUS = ("BackOff", "Failed", "FailedScheduling", "Unhealthy")

log = structlog.get_logger(__name__)


class PodWarnings:
    """Kubelets' warnings about pods that do not start: missing volumes, missing networks.

    Only events have them, not the status of a pod. So they are read if a pod takes long to start.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        # When the events of a job were read, and the warnings by pod name.
        self._cache: dict[JobKey, tuple[float, dict[str, KubeletWarning]]] = {}

    async def about(self, key: JobKey, pods: Sequence[KubeObject]) -> Mapping[str, KubeletWarning]:
        """Return the newest warning about each pod of a job that takes long to start."""
        slow = {uid(pod): podstate.name(pod) for pod in pods if _is_slow(pod)}
        if not slow:
            self._cache.pop(key, None)
            return {}
        read, warned = self._cache.get(key, (0.0, {}))
        if not read or time.monotonic() - read > AGAIN_SECONDS:
            warned = newest(await self._list(key[0]), slow)
            self._cache[key] = time.monotonic(), warned
        return warned

    def forget(self, key: JobKey) -> None:
        self._cache.pop(key, None)

    async def _list(self, namespace: str) -> list[KubeObject]:
        query = {"fieldSelector": "regarding.kind=Pod,type=Warning"}
        try:
            events: list[KubeObject] = (await self._api.get(collection("Event", namespace), query))[
                "items"
            ] or []
        # A job must not stop because its status says less.
        except errors.ApiError as error:
            log.warning("cannot read the events of pods that do not start", error=str(error))
            return []
        return events


def newest(events: Sequence[KubeObject], pods: Mapping[str, str]) -> dict[str, KubeletWarning]:
    """Return the newest warning about each pod, by its name.

    Parameters
    ----------
    events
        The warnings of a namespace.
    pods
        Names of the pods by uid. Events about an earlier pod of the same name do not count.

    """
    about = [event for event in events if event["regarding"].get("uid") in pods]
    relevant = [event for event in about if event.get("reason") not in _IN_STATUS]
    return {
        pods[event["regarding"]["uid"]]: KubeletWarning(
            event.get("reason", ""), event.get("note", ""), _times(event)
        )
        for event in sorted(relevant, key=_last_seen)
    }


def _last_seen(event: Mapping[str, Any]) -> str:
    # Clients of different ages write the time to different fields.
    series = (event.get("series") or {}).get("lastObservedTime")
    return str(series or event.get("deprecatedLastTimestamp") or event.get("eventTime") or "")


def _times(event: Mapping[str, Any]) -> int:
    return int((event.get("series") or {}).get("count") or event.get("deprecatedCount") or 1)


def _is_slow(pod: KubeObject) -> bool:
    created = clock.parse_optional(pod["metadata"].get("creationTimestamp"))
    waits = created is None or (datetime.now(UTC) - created).total_seconds() > PATIENCE_SECONDS
    return waits and podstate.is_starting(pod)
