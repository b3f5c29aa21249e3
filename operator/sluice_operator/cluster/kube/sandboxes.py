"""Sandboxes of kubernetes-sigs' agent-sandbox, which make episode pods if a job asks for them.

They are not watched, because most clusters do not serve this API, and some get it later. Only the
operator creates and deletes a job's Sandboxes, and their pods are watched. So Sandboxes are listed
when a job is first seen and now and then. Between two lists only those without a pod are read: such
a Sandbox may be gone, or say why it has no pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.api import RLJob
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api, Listener
from sluice_operator.cluster.kube.owned import check_owner
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.cluster.kube.store import lean_sandbox, owner_uid
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import KubeObject, uid
from sluice_operator.plan.manifests import sandbox

# Greatest age of the list of a job's Sandboxes, and of a Sandbox that has no pod.
RELIST_SECONDS, REREAD_SECONDS = 300.0, 5.0


@dataclass
class SandboxCache:
    """The Sandboxes of one job, by name."""

    objects: dict[str, KubeObject] = field(default_factory=dict)
    listed: float = 0.0  # when all were listed; 0 if never
    read: dict[str, float] = field(default_factory=dict)  # when a Sandbox was read

    def put(self, stored: KubeObject) -> None:
        name = podstate.name(stored)
        self.objects[name], self.read[name] = lean_sandbox(stored), time.monotonic()

    def drop(self, name: str) -> None:
        self.objects.pop(name, None)
        self.read.pop(name, None)


class Sandboxes:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._caches: dict[str, SandboxCache] = {}
        self._version = ""

    async def of_job(
        self, job: RLJob, pods: Sequence[KubeObject]
    ) -> tuple[str, tuple[KubeObject, ...]]:
        """Return the API version to use, and the job's Sandboxes.

        The version is empty if the cluster does not serve Sandboxes. pods: those of the job.
        """
        if not sandbox.uses_sandboxes(job) or not await self._served():
            return "", ()
        cache = self._of(job)
        try:
            if not cache.listed or time.monotonic() - cache.listed > RELIST_SECONDS:
                self._caches[job.metadata.uid] = cache = await self._list(job)
            await self._reread_without_pod(job, cache, pods)
        except errors.MissingApiError:
            # The cluster no longer serves the API.
            self._version = ""
            self.forget(job.metadata.uid)
            return "", ()
        return self._version, tuple(cache.objects.values())

    async def create(self, job: RLJob, manifest: KubeObject, warned: Listener) -> None:
        name, namespace = manifest["metadata"]["name"], job.metadata.namespace
        at = collection(names.SANDBOX, namespace, manifest["apiVersion"])
        try:
            stored = await self._api.create(at, manifest, warned)
        except errors.AlreadyExistsError:
            stored = await self._api.get(f"{at}/{name}")
            check_owner(job, names.SANDBOX, name, stored)
        except errors.MissingApiError:
            self._version = ""
            raise
        self._of(job).put(stored)

    async def delete(self, job: RLJob, name: str, pods: Sequence[KubeObject]) -> None:
        """Delete a Sandbox.

        pods: those of the job. After a restart of the operator, only they tell about their
        Sandboxes.
        """
        cache = self._of(job)
        target = _uids(cache.objects.values(), pods).get(name)
        if target is None or not await self._served():
            return
        at = path(names.SANDBOX, job.metadata.namespace, name, group_version=self._group_version())
        options = {"propagationPolicy": "Background", "preconditions": {"uid": target}}
        answer: KubeObject = {}
        with contextlib.suppress(errors.NotFoundError, errors.ConflictError):
            answer = await self._api.delete(at, options)
        if answer.get("kind") == names.SANDBOX and answer["metadata"].get("deletionTimestamp"):
            cache.put(answer)  # a finalizer keeps it
        else:
            cache.drop(name)

    def forget(self, job_uid: str) -> None:
        self._caches.pop(job_uid, None)

    def _of(self, job: RLJob) -> SandboxCache:
        return self._caches.setdefault(job.metadata.uid, SandboxCache())

    async def _list(self, job: RLJob) -> SandboxCache:
        at = collection(names.SANDBOX, job.metadata.namespace, self._group_version())
        cache = SandboxCache(listed=time.monotonic())
        async for page in self._api.pages(at, names.selector_text(names.selector(job))):
            for item in page["items"] or []:
                if owner_uid(item) == job.metadata.uid:
                    cache.put(item)
        return cache

    async def _reread_without_pod(
        self, job: RLJob, cache: SandboxCache, pods: Sequence[KubeObject]
    ) -> None:
        """Read Sandboxes without a pod again, unless they were read just now."""
        with_pod, now = {podstate.sandbox(pod) for pod in pods}, time.monotonic()
        due = [
            name
            for name in cache.objects
            if name not in with_pod and now - cache.read[name] > REREAD_SECONDS
        ]
        await asyncio.gather(*(self._read(job, cache, name) for name in due))

    async def _read(self, job: RLJob, cache: SandboxCache, name: str) -> None:
        group_version = self._group_version()
        at = path(names.SANDBOX, job.metadata.namespace, name, group_version=group_version)
        try:
            stored = await self._api.get(at)
        except errors.MissingApiError:
            raise
        except errors.NotFoundError:
            cache.drop(name)
            return
        if owner_uid(stored) == job.metadata.uid:
            cache.put(stored)
        else:
            cache.drop(name)

    async def _served(self) -> str:
        """Return the API version to use; empty as long as the cluster does not serve Sandboxes."""
        if not self._version:
            with contextlib.suppress(errors.NotFoundError):
                group = await self._api.get(f"/apis/{names.SANDBOX_GROUP}")
                served = [version["version"] for version in group["versions"]]
                self._version = sandbox.best_version(served)
        return self._version

    def _group_version(self) -> str:
        return f"{names.SANDBOX_GROUP}/{self._version}"


def _uids(sandboxes: Iterable[KubeObject], pods: Sequence[KubeObject]) -> Mapping[str, str]:
    """Return the uids of these Sandboxes and of those that own a pod, by name."""
    owners = {podstate.sandbox(pod): owner_uid(pod) for pod in pods}
    return owners | {podstate.name(stored): uid(stored) for stored in sandboxes}
