"""Sandboxes of kubernetes-sigs' agent-sandbox, which make the pods of episodes where a job asks for
them.

They are not watched: most clusters have no such API, and some get it later. Nobody but us makes and
deletes a job's Sandboxes, and their pods are watched; so they are listed when a job is first seen
and now and then, and between two lists only one that has no pod is read: it may be gone, or say
why.
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

RELIST_SECONDS, REREAD_SECONDS = 300.0, 5.0
"""Greatest age of the knowledge which Sandboxes there are; and of one that has no pod."""


@dataclass
class Known:
    """Of one job. objects: by name. listed, read: when they were, all and each; 0: not yet."""

    objects: dict[str, KubeObject] = field(default_factory=dict)
    listed: float = 0.0
    read: dict[str, float] = field(default_factory=dict)

    def put(self, stored: KubeObject) -> None:
        name = podstate.name(stored)
        self.objects[name], self.read[name] = lean_sandbox(stored), time.monotonic()

    def drop(self, name: str) -> None:
        self.objects.pop(name, None)
        self.read.pop(name, None)


class Sandboxes:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: dict[str, Known] = {}
        self._version = ""

    async def of(
        self, job: RLJob, pods: Sequence[KubeObject]
    ) -> tuple[str, tuple[KubeObject, ...]]:
        """The version to speak, empty: the cluster has none; and the job's Sandboxes.

        pods: the job's.
        """
        if not sandbox.is_wanted(job) or not await self._served():
            return "", ()
        known = self._of(job)
        try:
            if not known.listed or time.monotonic() - known.listed > RELIST_SECONDS:
                self._known[job.metadata.uid] = known = await self._list(job)
            await self._look(job, known, pods)
        except errors.MissingApiError:  # it was there, and is there no more
            self._version = ""
            self.forget(job.metadata.uid)
            return "", ()
        return self._version, tuple(known.objects.values())

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
        """pods: the job's; after a restart of ours they are all that tells of their Sandboxes."""
        known = self._of(job)
        target = _uids(known.objects.values(), pods).get(name)
        if target is None or not await self._served():
            return
        at = path(names.SANDBOX, job.metadata.namespace, name, group_version=self._group_version())
        options = {"propagationPolicy": "Background", "preconditions": {"uid": target}}
        answer: KubeObject = {}
        with contextlib.suppress(errors.NotFoundError, errors.ConflictError):
            answer = await self._api.delete(at, options)
        if answer.get("kind") == names.SANDBOX and answer["metadata"].get("deletionTimestamp"):
            known.put(answer)  # somebody's finalizer keeps it
        else:
            known.drop(name)

    def forget(self, job_uid: str) -> None:
        self._known.pop(job_uid, None)

    def _of(self, job: RLJob) -> Known:
        return self._known.setdefault(job.metadata.uid, Known())

    async def _list(self, job: RLJob) -> Known:
        at = collection(names.SANDBOX, job.metadata.namespace, self._group_version())
        known = Known(listed=time.monotonic())
        async for page in self._api.pages(at, names.selector_text(names.selector(job))):
            for each in page["items"] or []:
                if owner_uid(each) == job.metadata.uid:
                    known.put(each)
        return known

    async def _look(self, job: RLJob, known: Known, pods: Sequence[KubeObject]) -> None:
        """Read those again that have no pod, if it was not just now."""
        with_pod, now = {podstate.sandbox(pod) for pod in pods}, time.monotonic()
        due = [
            name
            for name in known.objects
            if name not in with_pod and now - known.read[name] > REREAD_SECONDS
        ]
        await asyncio.gather(*(self._read(job, known, name) for name in due))

    async def _read(self, job: RLJob, known: Known, name: str) -> None:
        group_version = self._group_version()
        at = path(names.SANDBOX, job.metadata.namespace, name, group_version=group_version)
        try:
            stored = await self._api.get(at)
        except errors.MissingApiError:
            raise
        except errors.NotFoundError:
            known.drop(name)
            return
        if owner_uid(stored) == job.metadata.uid:
            known.put(stored)
        else:
            known.drop(name)

    async def _served(self) -> str:
        """The version that we speak; empty: the cluster has none. Asked for until there is one."""
        if not self._version:
            with contextlib.suppress(errors.NotFoundError):
                group = await self._api.get(f"/apis/{names.SANDBOX_GROUP}")
                served = [each["version"] for each in group["versions"]]
                self._version = sandbox.best_version(served)
        return self._version

    def _group_version(self) -> str:
        return f"{names.SANDBOX_GROUP}/{self._version}"


def _uids(sandboxes: Iterable[KubeObject], pods: Sequence[KubeObject]) -> Mapping[str, str]:
    """Name of a Sandbox -> its uid, of those that are known, or that own a pod."""
    owners = [owner_uid(pod) for pod in pods]
    of_pods = {podstate.sandbox(pod): owner for pod, owner in zip(pods, owners, strict=True)}
    return of_pods | {podstate.name(each): uid(each) for each in sandboxes}
