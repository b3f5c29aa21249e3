"""Objects of a job besides its pods, at the API server.

These few objects are not watched. They are read when a job is first seen, and again from time to
time. Secrets are never read: as long as no pod proves that they are there they are created again,
and "already exists" is a good answer.
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

REREAD_SECONDS, REREAD_WAITING_SECONDS = 300.0, 30.0
"""Greatest age of the knowledge of a job's objects; and while pods do not start, which may be for
want of one."""


@dataclass
class Owned:
    """Of one job. absent: kinds that the API server does not know. read: when; 0: not yet."""

    objects: dict[tuple[str, str], KubeObject] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    read: float = 0.0


class OwnedObjects:
    """pods_of: a job's pods, as they are known."""

    def __init__(
        self, api: Api, keys: JobKeys, pods_of: Callable[[RLJob], list[KubeObject]]
    ) -> None:
        self._api, self._keys, self._pods_of = api, keys, pods_of
        self._known: dict[str, Owned] = {}

    def known(self, job_uid: str) -> Owned:
        """The objects as they were last read, or made."""
        return self._known.get(job_uid) or Owned()

    def forget(self, job_uid: str) -> None:
        self._known.pop(job_uid, None)

    async def read(self, job: RLJob) -> Owned:
        """ForeignObjectError: something of a name that the job needs belongs to somebody else."""
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
        wanted = [key for key in supporting if key[0] != "Secret"]
        answers = await asyncio.gather(
            *(self._get(kind, name, job.metadata.namespace) for kind, name in wanted)
        )
        present = {
            key: stored for key, stored in zip(wanted, answers, strict=True) if stored is not None
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
        """The ConfigMap that holds the manifest which this job's pods were started with; None:
        nothing was.
        """
        owned = self.known(uid(stored))
        key = ("ConfigMap", f"{stored['metadata']['name']}-config")
        if owned.read:
            return owned.objects.get(key)
        config_map = await self._get(*key, stored["metadata"]["namespace"])
        return (
            config_map if config_map is not None and owner_uid(config_map) == uid(stored) else None
        )

    async def apply(self, job: RLJob, manifest: KubeObject, warned: Listener) -> None:
        """By server-side apply; but a Secret is created, and one that is there has this job's uid
        in its name.
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

    def _of(self, job: RLJob) -> Owned:
        return self._known.setdefault(job.metadata.uid, Owned())

    def _has_its_secrets(self, job: RLJob) -> bool:
        """We may not look. Pods that run have read them; if none does, or one does not start, they
        are made again.
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
        whose = (
            "a former owner, and is being deleted"
            if owner
            else "somebody else; delete or rename it, or the job"
        )
        raise errors.ForeignObjectError(
            f"{kind} {name} is needed by RLJob {job.key} but belongs to {whose}"
        )


def _lean(stored: KubeObject) -> KubeObject:
    stored["metadata"].pop("managedFields", None)
    return compact(stored)


def _with_protocols(manifest: KubeObject) -> KubeObject:
    """API servers before 1.23 refuse to apply a Service's port without its protocol, which is part
    of its key there.
    """
    if manifest["kind"] != "Service" or "ports" not in manifest["spec"]:
        return manifest
    ports = [{"protocol": "TCP", **port} for port in manifest["spec"]["ports"]]
    return {**manifest, "spec": {**manifest["spec"], "ports": ports}}
