"""The objects that a job owns at the API server, except pods.

These few objects are not watched. They are read when a job is first seen, and again from time to
time. Secrets are never read: until a running pod proves that they exist, they are created again,
and the answer "already exists" is fine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.api import RLJob
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube import optional_objects
from sluice_operator.cluster.kube.api import Api, Listener
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.cluster.kube.store import compact, owner_uid
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import Deletion, KubeObject, uid
from sluice_operator.plan.manifests.objects import supporting_objects

# Greatest age of what was read; and while pods do not start, because an object may be missing.
REREAD_SECONDS, REREAD_WAITING_SECONDS = 300.0, 30.0


@dataclass
class OwnedCache:
    """The objects of one job, as they were last read or written."""

    objects: dict[tuple[str, str], KubeObject] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()  # kinds that the API server does not serve
    read: float = 0.0  # when they were read; 0 if never


class OwnedObjects:
    """The owned objects of all jobs. pods_of: returns the pods of a job from memory."""

    def __init__(
        self, api: Api, keys: JobKeys, pods_of: Callable[[RLJob], list[KubeObject]]
    ) -> None:
        self._api, self._keys, self._pods_of = api, keys, pods_of
        self._caches: dict[str, OwnedCache] = {}

    def cached(self, job_uid: str) -> OwnedCache:
        """Return the objects as they were last read or written."""
        return self._caches.get(job_uid) or OwnedCache()

    def forget(self, job_uid: str) -> None:
        self._caches.pop(job_uid, None)

    async def read(self, job: RLJob) -> OwnedCache:
        """Return the job's objects, read again if they are too old.

        Raises
        ------
        ForeignObjectError
            An object with a name that the job needs belongs to another owner.

        """
        owned = self._of(job)
        patience = (
            REREAD_WAITING_SECONDS
            if any(map(podstate.is_starting, self._pods_of(job)))
            else REREAD_SECONDS
        )
        if owned.read and time.monotonic() - owned.read < patience:
            return owned
        supporting = {
            (manifest["kind"], manifest["metadata"]["name"]): manifest
            for manifest in supporting_objects(job)
        }
        readable = [key for key in supporting if key[0] != "Secret"]
        answers = await asyncio.gather(
            *(self._get(kind, name, job.metadata.namespace) for kind, name in readable)
        )
        present = {
            key: stored for key, stored in zip(readable, answers, strict=True) if stored is not None
        }
        more = await optional_objects.read(self._api, job)
        present |= {key: _lean(stored) for key, stored in more.objects.items()}
        secrets = {key: manifest for key, manifest in supporting.items() if key[0] == "Secret"}
        for (kind, name), stored in present.items():
            check_owner(job, kind, name, stored)
        owned.absent = more.absent
        owned.objects = present | (secrets if self._has_its_secrets(job) else {})
        owned.read = time.monotonic()
        return owned

    async def config(self, stored: KubeObject) -> KubeObject | None:
        """Return the ConfigMap with the manifest that the job's pods were started with.

        None if no pod was started.
        """
        owned = self.cached(uid(stored))
        key = ("ConfigMap", f"{stored['metadata']['name']}-config")
        if owned.read:
            return owned.objects.get(key)
        config_map = await self._get(*key, stored["metadata"]["namespace"])
        return (
            config_map if config_map is not None and owner_uid(config_map) == uid(stored) else None
        )

    async def apply(self, job: RLJob, manifest: KubeObject, warned: Listener) -> None:
        """Apply an object server-side. A Secret is created, and stays if it exists.

        The names of Secrets contain the job's uid, so an existing one belongs to this job.
        """
        kind, name, namespace = (
            manifest["kind"],
            manifest["metadata"]["name"],
            job.metadata.namespace,
        )
        if kind == "Secret":
            with contextlib.suppress(errors.AlreadyExistsError):
                await self._api.create(
                    collection(kind, namespace), self._keys.filled(job, manifest), warned
                )
            stored = manifest
        else:
            answer = await self._api.apply(
                optional_objects.location(job, kind, name), _with_protocols(manifest), warned
            )
            stored = _lean(answer)
        self._of(job).objects[kind, name] = stored

    async def delete(self, job: RLJob, deletion: Deletion) -> None:
        owned = self._of(job)
        stored = owned.objects.get((deletion.kind, deletion.name))
        if stored is None:
            return
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid(stored)}}
        with contextlib.suppress(errors.NotFoundError, errors.ConflictError):
            await self._api.delete(
                optional_objects.location(job, deletion.kind, deletion.name), options
            )
        owned.objects.pop((deletion.kind, deletion.name), None)

    def _of(self, job: RLJob) -> OwnedCache:
        return self._caches.setdefault(job.metadata.uid, OwnedCache())

    def _has_its_secrets(self, job: RLJob) -> bool:
        """Return True if the job's Secrets exist, as far as its pods show.

        The operator may not read Secrets. Pods that run have read them. If no pod runs, or one does
        not start, the Secrets are created again.
        """
        pods = self._pods_of(job)
        return any(map(podstate.is_running, pods)) and not any(map(podstate.is_starting, pods))

    async def _get(self, kind: str, name: str, namespace: str) -> KubeObject | None:
        try:
            return _lean(await self._api.get(path(kind, namespace, name)))
        except errors.NotFoundError:
            return None


def check_owner(job: RLJob, kind: str, name: str, stored: KubeObject) -> None:
    owner = owner_uid(stored) or (stored["metadata"].get("labels") or {}).get(names.LABEL_UID, "")
    if owner != job.metadata.uid:
        other = (
            "a former owner, and is being deleted"
            if owner
            else "another owner; delete or rename it, or the job"
        )
        raise errors.ForeignObjectError(
            f"{kind} {name} is needed by RLJob {job.key} but belongs to {other}"
        )


def _lean(stored: KubeObject) -> KubeObject:
    stored["metadata"].pop("managedFields", None)
    return compact(stored)


def _with_protocols(manifest: KubeObject) -> KubeObject:
    """Return the object with the protocol of each port of a Service.

    API servers before 1.23 refuse to apply a port without it, because it is part of the merge key.
    """
    if manifest["kind"] != "Service" or "ports" not in manifest["spec"]:
        return manifest
    ports = [{"protocol": "TCP", **port} for port in manifest["spec"]["ports"]]
    return {**manifest, "spec": {**manifest["spec"], "ports": ports}}
