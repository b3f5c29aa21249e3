"""Reads a job of a cluster with a person's rights, for `sluice status` and `sluice logs`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.kube_config import list_kube_config_contexts

from sluice.api import FINISHED, GROUP, PLURAL, pool
from sluice.runtime.pod_env import ConfigurationError
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.cluster.view import (
    JobEvent,
    JobSnapshot,
    LogStream,
    MissingJobError,
    ReadError,
    TimedLine,
    log_streams,
)
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import KubeObject

EVENTS, AGAIN_SECONDS = 50, 1.0
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NOT_YET = (
    "is waiting to start",
    "does not have a host assigned",
    "ContainerCreating",
    "PodInitializing",
)


@contextlib.asynccontextmanager
async def connect(name: str, namespace: str | None) -> AsyncIterator[KubeReader]:
    """Connect to the API server of the kubeconfig.

    Parameters
    ----------
    name
        The job's name.
    namespace
        Its namespace; None for that of the kubeconfig's context.

    Raises
    ------
    ConfigurationError
        No API server is configured.

    """
    async with await Api.connect() as api:
        yield KubeReader(api, name, namespace or current_namespace())


class KubeReader:
    def __init__(self, api: Api, name: str, namespace: str) -> None:
        self._api, self._name, self._namespace = api, name, namespace

    async def snapshot(self) -> JobSnapshot:
        job = await self._job()
        pods, (events, notes) = await asyncio.gather(self._pods(), self._events())
        in_order = tuple(sorted(events, key=lambda event: event.time))
        return JobSnapshot(f"namespace {self._namespace}", job, tuple(pods), in_order, notes)

    async def jobs(self, *, everywhere: bool) -> list[KubeObject]:
        """Return all jobs of the namespace, or of all namespaces. Raises ReadError."""
        return await self._all("RLJob", PLURAL, None if everywhere else self._namespace)

    async def pools(self) -> list[KubeObject]:
        """Return all pools of engines of the namespace. Raises ReadError."""
        return await self._all(pool.KIND, pool.PLURAL, self._namespace)

    async def _all(self, kind: str, plural: str, namespace: str | None) -> list[KubeObject]:
        try:
            with self._explained("list", plural):
                return (await self._api.get(collection(kind, namespace)))["items"] or []
        except errors.NotFoundError as error:
            text = f"this cluster does not know {kind}s: the CRD {plural}.{GROUP} is not installed"
            raise ReadError(f"{text} (helm install sluice charts/sluice)") from error

    async def streams(self) -> tuple[list[LogStream], bool]:
        job, pods = await asyncio.gather(self._job(), self._pods())
        ended = (job.get("status") or {}).get("state") in FINISHED
        return [stream for pod in pods for stream in log_streams(pod)], ended

    async def lines(
        self, stream: LogStream, *, follow: bool, tail: int | None
    ) -> AsyncIterator[TimedLine]:
        """Yield the lines of a log. A lost connection is resumed after the last line."""
        at = path("Pod", self._namespace, stream.pod, "log")
        query: dict[str, Any] = {"container": stream.container, "timestamps": "true"}
        query |= {"follow": "true"} if follow else {}
        query |= {"tailLines": tail} if tail is not None else {}
        last = resumed_from = datetime.min.replace(tzinfo=UTC)
        while True:
            try:
                with self._explained("get", "pods/log"):
                    async for line in self._api.lines(at, query):
                        stamp, _, text = line.partition(" ")
                        last = datetime.fromisoformat(stamp)
                        if last > resumed_from:
                            yield last, text
                return
            except errors.NotFoundError as error:
                what = (
                    "the pod is gone"
                    if stream.pod in str(error)
                    else "its node is not there to give it"
                )
                raise ReadError(f"no log of {stream.name}: {what} ({error})") from error
            except errors.InvalidError as error:
                if not follow or not any(words in str(error) for words in _NOT_YET):
                    raise ReadError(f"no log of {stream.name}: {error}") from error
            except errors.UnavailableError as error:
                if not follow or last.year == 1:
                    raise ReadError(f"no log of {stream.name}: {error}") from error
            if last > resumed_from:
                resumed_from = last
                query = {"container": stream.container, "timestamps": "true", "follow": "true"}
                # In whole seconds, so lines of the last second come again and are skipped.
                query["sinceTime"] = resumed_from.strftime("%Y-%m-%dT%H:%M:%SZ")
            await asyncio.sleep(AGAIN_SECONDS)

    async def _job(self) -> KubeObject:
        try:
            with self._explained("get", "rljobs"):
                return await self._api.get(path("RLJob", self._namespace, self._name))
        except errors.NotFoundError:
            jobs = await self.jobs(everywhere=False)  # ReadError if the CRD is not installed
        present = ", ".join(job["metadata"]["name"] for job in jobs)
        raise MissingJobError(
            f"there is no RLJob {self._name} in namespace {self._namespace}"
            + (f", which has {present}" if present else "; look with: kubectl get rljobs -A")
        )

    async def _pods(self) -> list[KubeObject]:
        query = {"labelSelector": f"{names.LABEL_JOB}={self._name}"}
        with self._explained("list", "pods"):
            return (await self._api.get(collection("Pod", self._namespace), query))["items"] or []

    async def _events(self) -> tuple[list[JobEvent], tuple[str, ...]]:
        """Return events of the job and warnings about its pods, or a note if they are forbidden."""
        selector = f"regarding.kind=RLJob,regarding.name={self._name}"
        try:
            with self._explained("list", "events.events.k8s.io"):
                about_job = await self._list_events(selector)
                about_pods = await self._list_events("regarding.kind=Pod,type=Warning")
        except ReadError as error:
            return [], (str(error),)
        about_own_pods = [
            event for event in about_pods if event["regarding"]["name"].startswith(f"{self._name}-")
        ]
        return [_job_event(event) for event in about_job + about_own_pods], ()

    async def _list_events(self, selector: str) -> list[KubeObject]:
        return (
            await self._api.get(collection("Event", self._namespace), {"fieldSelector": selector})
        )["items"] or []

    @contextlib.contextmanager
    def _explained(self, verb: str, resource: str) -> Iterator[None]:
        """Convert errors about which a person can do something into ReadError."""
        try:
            yield
        except errors.ForbiddenError as error:
            if error.status == 401:
                raise ReadError(
                    f"the API server does not know you ({error}): log in, or set KUBECONFIG"
                ) from error
            text = f"you have no right to {verb} {resource} in namespace {self._namespace}"
            raise ReadError(f"{text}; ask for the role sluice-viewer ({error})") from error
        except errors.UnavailableError as error:
            if resource == "pods/log":
                raise
            raise ReadError(f"no answer from the API server: {error}") from error


def current_namespace() -> str:
    """Return the namespace of the kubeconfig's context, or of the pod that this runs in."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"
    try:
        _, active = list_kube_config_contexts(os.environ.get("KUBECONFIG") or None)
    except ConfigException as error:
        raise ConfigurationError(f"no API server is known: set KUBECONFIG ({error})") from error
    return str((active.get("context") or {}).get("namespace") or "default")


def _job_event(event: KubeObject) -> JobEvent:
    series = event.get("series") or {}
    # Old clients write the time to other fields.
    time = (
        series.get("lastObservedTime")
        or event.get("deprecatedLastTimestamp")
        or event.get("eventTime")
    )
    regarding = event["regarding"]
    return JobEvent(
        datetime.fromisoformat(time or event["metadata"]["creationTimestamp"]),
        event.get("type") or "Normal",
        event.get("reason") or "",
        event.get("note") or "",
        regarding["name"] if regarding.get("kind") == "Pod" else "",
        series.get("count") or event.get("deprecatedCount") or 1,
    )
