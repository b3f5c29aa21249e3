"""The objects that a job or a pool owns at the API server, except pods.

These few objects are not watched. They are read when their owner is first seen, and again from
time to time. Secrets are never read: until a running pod proves that they exist, they are created
again, and the answer "already exists" is fine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sluice.api import RLEnginePool, RLJob
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube import optional_objects
from sluice_operator.cluster.kube.api import Api, Listener
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.cluster.kube.store import compact, owner_uid
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import Deletion, KubeObject, uid

OwnerT = TypeVar("OwnerT", bound=RLJob | RLEnginePool)
# Greatest age of what was read; and while pods do not start, because an object may be missing.
REREAD_SECONDS, REREAD_WAITING_SECONDS = 300.0, 30.0


@dataclass
class OwnedCache:
    """The objects of one owner, as they were last read or written."""

    objects: dict[tuple[str, str], KubeObject] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()  # kinds that the API server does not serve
    read: float = 0.0  # when they were read; 0 if never


class OwnedObjects(Generic[OwnerT]):
    """The owned objects of all jobs, or of all pools."""

    def __init__(
        self,
        api: Api,
        keys: JobKeys,
        pods_of: Callable[[OwnerT], list[KubeObject]],
        supporting: Callable[[OwnerT], Sequence[KubeObject]],
        optional: Callable[[OwnerT], Awaitable[optional_objects.OptionalObjects]],
    ) -> None:
        """Create an empty memory of owned objects.

        Parameters
        ----------
        api
            The API server.
        keys
            Fill Secrets.
        pods_of
            Returns the pods of an owner from memory.
        supporting
            Returns the objects that an owner always has.
        optional
            Reads the objects that it may have or lack.

        """
        self._api, self._keys, self._pods_of = api, keys, pods_of
        self._supporting, self._optional = supporting, optional
        self._caches: dict[str, OwnedCache] = {}

    def cached(self, owner: str) -> OwnedCache:
        """Return the objects as they were last read or written. owner: its uid."""
        return self._caches.get(owner) or OwnedCache()

    def forget(self, owner: str) -> None:
        self._caches.pop(owner, None)

    async def read(self, owner: OwnerT, *, lacks_pods: bool = False) -> OwnedCache:
        """Return the owner's objects, read again if they are too old.

        lacks_pods: whether an object that makes pods may have been changed or deleted.

        Raises
        ------
        ForeignObjectError
            An object with a name that is needed belongs to another owner.

        """
        owned = self._of(owner)
        patience = (
            REREAD_WAITING_SECONDS
            if lacks_pods or any(map(podstate.is_starting, self._pods_of(owner)))
            else REREAD_SECONDS
        )
        if owned.read and time.monotonic() - owned.read < patience:
            return owned
        supporting = {
            (manifest["kind"], manifest["metadata"]["name"]): manifest
            for manifest in self._supporting(owner)
        }
        readable = [key for key in supporting if key[0] != "Secret"]
        answers = await asyncio.gather(
            *(self._get(kind, name, owner.metadata.namespace) for kind, name in readable)
        )
        present = {
            key: stored for key, stored in zip(readable, answers, strict=True) if stored is not None
        }
        more = await self._optional(owner)
        present |= {key: _lean(stored) for key, stored in more.objects.items()}
        secrets = {key: manifest for key, manifest in supporting.items() if key[0] == "Secret"}
        for (kind, name), stored in present.items():
            check_owner(owner, kind, name, stored)
        owned.absent = more.absent
        owned.objects = present | (secrets if self._has_its_secrets(owner) else {})
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

    async def apply(self, owner: OwnerT, manifest: KubeObject, warned: Listener) -> None:
        """Apply an object server-side. A Secret is created, and stays if it exists.

        The names of Secrets contain the owner's uid, so an existing one belongs to it.
        """
        kind, name, namespace = (
            manifest["kind"],
            manifest["metadata"]["name"],
            owner.metadata.namespace,
        )
        if kind == "Secret":
            with contextlib.suppress(errors.AlreadyExistsError):
                await self._api.create(
                    collection(kind, namespace), self._keys.filled(owner, manifest), warned
                )
            stored = manifest
        else:
            answer = await self._api.apply(
                optional_objects.location(owner, kind, name), _with_protocols(manifest), warned
            )
            stored = _lean(answer)
        self._of(owner).objects[kind, name] = stored

    async def delete(self, owner: OwnerT, deletion: Deletion) -> None:
        owned = self._of(owner)
        stored = owned.objects.get((deletion.kind, deletion.name))
        if stored is None:
            return
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid(stored)}}
        with contextlib.suppress(errors.NotFoundError, errors.ConflictError):
            await self._api.delete(
                optional_objects.location(owner, deletion.kind, deletion.name), options
            )
        owned.objects.pop((deletion.kind, deletion.name), None)

    def _of(self, owner: OwnerT) -> OwnedCache:
        return self._caches.setdefault(owner.metadata.uid, OwnedCache())

    def _has_its_secrets(self, owner: OwnerT) -> bool:
        """Return True if the owner's Secrets exist, as far as its pods show.

        The operator may not read Secrets. Pods that run have read them. If no pod runs, or one does
        not start, the Secrets are created again.
        """
        pods = self._pods_of(owner)
        return any(map(podstate.is_running, pods)) and not any(map(podstate.is_starting, pods))

    async def _get(self, kind: str, name: str, namespace: str) -> KubeObject | None:
        try:
            return _lean(await self._api.get(path(kind, namespace, name)))
        except errors.NotFoundError:
            return None


def check_owner(needed_by: names.Owner, kind: str, name: str, stored: KubeObject) -> None:
    owner = owner_uid(stored) or (stored["metadata"].get("labels") or {}).get(names.LABEL_UID, "")
    if owner != needed_by.metadata.uid:
        what = "job" if isinstance(needed_by, RLJob) else "pool"
        other = (
            "a former owner, and is being deleted"
            if owner
            else f"another owner; delete or rename it, or the {what}"
        )
        raise errors.ForeignObjectError(
            f"{kind} {name} is needed by {needed_by.kind} {needed_by.key} but belongs to {other}"
        )


def _lean(stored: KubeObject) -> KubeObject:
    stored["metadata"].pop("managedFields", None)
    return compact(stored)


def _with_protocols(manifest: KubeObject) -> KubeObject:
    """Return a Service or a StatefulSet with the protocol of each port.

    API servers before 1.23 refuse to apply a port without it, because it is part of the merge key.
    """
    spec: dict[str, Any] = manifest.get("spec") or {}
    if manifest["kind"] == "Service" and "ports" in spec:
        return {**manifest, "spec": {**spec, "ports": _tcp(spec["ports"])}}
    if manifest["kind"] == "StatefulSet":
        template = spec["template"]
        containers = [
            {**container, "ports": _tcp(container.get("ports") or [])}
            for container in template["spec"]["containers"]
        ]
        template = {**template, "spec": {**template["spec"], "containers": containers}}
        return {**manifest, "spec": {**spec, "template": template}}
    return manifest


def _tcp(ports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", **port} for port in ports]
