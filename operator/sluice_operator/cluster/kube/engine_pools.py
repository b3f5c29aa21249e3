"""RLEnginePools of an API server, and their objects.

Pools and their pods are watched as jobs are. The pods are made by the StatefulSet's controller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.api import FINISHED, RLEnginePool, RLEnginePoolStatus
from sluice.api.pool import KIND
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube import optional_objects, stored_status
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.events import PodWarnings, post
from sluice_operator.cluster.kube.owned import OwnedObjects
from sluice_operator.cluster.kube.paths import path
from sluice_operator.cluster.kube.server_warnings import (
    ServerWarning,
    ServerWarnings,
    collector,
)
from sluice_operator.cluster.kube.store import Store, lean_job, lean_pod
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS, JobDefaults
from sluice_operator.plan.facts.model import (
    Deletion,
    Event,
    Images,
    JobKey,
    KubeObject,
    PoolKey,
    uid,
)
from sluice_operator.plan.manifests.engine_pool import pool_objects
from sluice_operator.plan.pool import PoolObserved, extra_keys

POD_LABELS = f"{names.LABEL_POOL},{names.LABEL_ROLE}={names.ENGINE}"


class KubePools:
    """The pools of an API server."""

    def __init__(
        self,
        api: Api,
        identity: str,
        keys: JobKeys,
        namespace: str,
        defaults: JobDefaults,
        jobs: Store,
    ) -> None:
        """Create pools whose memory is empty.

        Parameters
        ----------
        api
            The API server.
        identity
            Name of this process in events.
        keys
            Derive the keys of pools.
        namespace
            The operator's namespace.
        defaults
            Defaults of the cluster.
        jobs
            The memory of all jobs.

        """
        self._api, self._identity, self._namespace = api, identity, namespace
        self._defaults, self._jobs = defaults, jobs
        self.store = Store(_key_of, lean_job)
        self.pods = Store(pool_of_pod, lean_pod)
        self.watched = ((self.store, KIND, ""), (self.pods, "Pod", POD_LABELS))
        self._owned = OwnedObjects[RLEnginePool](
            api, keys, self._pods, _supporting, self._read_optional
        )
        self._warnings = PodWarnings(api)
        self._server_warnings = ServerWarnings()

    # -- memory

    def stored(self, key: PoolKey) -> KubeObject | None:
        return self.store.newest((key.namespace, key.name))

    def all_keys(self) -> list[PoolKey]:
        return [PoolKey(*key) for key in self.store.all_keys()]

    def pods_of(self, key: PoolKey) -> list[KubeObject]:
        return self.pods.of_job((key.namespace, key.name))

    def users(self, key: PoolKey) -> list[JobKey]:
        """Return the unfinished jobs that name the pool."""
        jobs = (self._jobs.newest(job) for job in self._jobs.all_keys() if job[0] == key.namespace)
        using = [stored for stored in jobs if stored and pool_of_job(stored) == key]
        return sorted(_key_of(stored) for stored in using if not _has_ended(stored))

    def forget(self, stored: KubeObject) -> None:
        """Forget a pool that is gone."""
        self.store.bury(stored)
        self._owned.forget(uid(stored))
        self._warnings.forget(_key_of(stored))
        self._server_warnings.forget(uid(stored))

    # -- one pass

    async def observe(self, pool: RLEnginePool) -> PoolObserved:
        """Return the pool's objects, without its progress."""
        key = PoolKey(pool.metadata.namespace, pool.metadata.name)
        pods = self._pods(pool)
        owned = await self._owned.read(pool, lacks_pods=len(pods) < pool.spec.replicas)
        warned = await self._warnings.about((key.namespace, key.name), pods)
        stored_status.check_fresh(self.store, pool)
        return PoolObserved(
            tuple(self._pods(pool)),
            dict(owned.objects),
            absent_kinds=owned.absent,
            operator_namespace=self._namespace,
            warned=warned,
            defaults=self._defaults,
            jobs=tuple(name for _, name in self.users(key)),
        )

    async def store_status(self, stored: KubeObject, status: RLEnginePoolStatus) -> None:
        """Write the status, unless it is equal to the stored one."""
        warnings: list[ServerWarning] = []
        whole = {**stored, "kind": KIND}
        listener = collector(warnings, whole)
        await stored_status.write(self._api, self.store, whole, status, listener, self.forget)
        await self.tell(stored, self._server_warnings.news(uid(stored), warnings))

    async def apply(self, pool: RLEnginePool, objects: Sequence[KubeObject]) -> None:
        """Create objects, or update them to this state."""
        warnings: list[ServerWarning] = []
        try:
            for manifest in objects:
                await self._owned.apply(pool, manifest, collector(warnings, manifest))
        finally:
            stored = self.store.newest((pool.metadata.namespace, pool.metadata.name))
            if stored is not None:
                await self.tell(stored, self._server_warnings.news(uid(stored), warnings))

    async def delete(self, pool: RLEnginePool, deletions: Sequence[Deletion]) -> None:
        await asyncio.gather(*(self._delete(pool, deletion) for deletion in deletions))

    async def _delete(self, pool: RLEnginePool, deletion: Deletion) -> None:
        if deletion.kind != "Pod":
            await self._owned.delete(pool, deletion)
            return
        for pod in self._pods(pool):
            if pod["metadata"]["name"] == deletion.name:
                at = path("Pod", pool.metadata.namespace, deletion.name)
                body = {
                    "gracePeriodSeconds": deletion.grace,
                    "preconditions": {"uid": uid(pod)},
                }
                # Not found: it is gone. A conflict: another one has its name.
                with contextlib.suppress(errors.NotFoundError, errors.ConflictError):
                    await self._api.delete(at, body)
                self.pods.bury(pod)

    async def tell(self, stored: KubeObject, events: Sequence[Event]) -> None:
        """Create events about a pool."""
        await post(self._api, {**stored, "kind": KIND}, events, self._identity)

    def _pods(self, pool: RLEnginePool) -> list[KubeObject]:
        return self.pods.of_job((pool.metadata.namespace, pool.metadata.name))

    async def _read_optional(self, pool: RLEnginePool) -> optional_objects.OptionalObjects:
        return await optional_objects.read_named(
            self._api, extra_keys(pool), pool.metadata.namespace
        )


def pool_of_pod(pod: Mapping[str, Any]) -> JobKey | None:
    """Return namespace and name of the pool that a pod is an engine of; None if it is none."""
    labels = pod["metadata"].get("labels") or {}
    pool = labels.get(names.LABEL_POOL)
    is_engine = labels.get(names.LABEL_ROLE) == names.ENGINE
    return (pod["metadata"]["namespace"], pool) if pool and is_engine else None


def pool_of_job(job: Mapping[str, Any]) -> PoolKey | None:
    """Return the pool that a stored job names; None if it names none."""
    rollout = (job.get("spec") or {}).get("rollout") or {}
    name = rollout.get("pool")
    return PoolKey(job["metadata"]["namespace"], name) if name else None


def _supporting(pool: RLEnginePool) -> Sequence[KubeObject]:
    # Only kinds and names matter here.
    return pool_objects(pool, Images(), NO_DEFAULTS)


def _has_ended(job: KubeObject) -> bool:
    return (job.get("status") or {}).get("state") in FINISHED


def _key_of(stored: Mapping[str, Any]) -> JobKey:
    return stored["metadata"]["namespace"], stored["metadata"]["name"]
