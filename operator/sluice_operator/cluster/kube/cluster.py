"""KubeCluster: the Cluster protocol on an API server.

Reads come from memory (cluster/kube/store.py). Watches fill it, and each answer to one of the
operator's own writes updates it at once, so a pass always sees the writes of the passes before it.
The few other objects of a job are not watched; owned.py reads them.

A write may be repeated, and another operator may write at the same time. So names are
deterministic, a creation that finds its object is done, a deletion names the uid, and a status
carries the version that it was planned from.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from sluice.api import KIND, RLJob, RLJobStatus
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube import (
    fetch_logs,
    optional_objects,
    pool_of_job,
    stored_status,
)
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.engine_pools import KubePools
from sluice_operator.cluster.kube.events import PodWarnings, post
from sluice_operator.cluster.kube.kueue import Workloads
from sluice_operator.cluster.kube.owned import OwnedObjects, check_owner
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.cluster.kube.sandboxes import Sandboxes
from sluice_operator.cluster.kube.server_warnings import (
    ServerWarning,
    ServerWarnings,
    collector,
)
from sluice_operator.cluster.kube.store import (
    Store,
    job_uid,
    lean_job,
    lean_pod,
    version,
)
from sluice_operator.plan.decide.gangs import lacks_pods
from sluice_operator.plan.decide.pod_groups import finished_groups, pods_by_group
from sluice_operator.plan.decide.pools import with_workers
from sluice_operator.plan.facts import clock, names, podstate
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS, JobDefaults
from sluice_operator.plan.facts.model import Deletion, Event, JobKey, KubeObject, Observed, uid
from sluice_operator.plan.manifests.objects import supporting_objects

# On the pods of jobs and of pools.
POD_SELECTOR = names.LABEL_ROLE


class KubeCluster:
    """The jobs of an API server, and their objects."""

    def __init__(
        self,
        api: Api,
        identity: str,
        keys: JobKeys,
        namespace: str,
        defaults: JobDefaults = NO_DEFAULTS,
    ) -> None:
        """Create a cluster whose memory is empty.

        Parameters
        ----------
        api
            The API server.
        identity
            Name of this process in events.
        keys
            Derive the credentials of jobs.
        namespace
            The operator's namespace.
        defaults
            Defaults for all jobs.

        """
        self.api, self.identity, self.keys, self.namespace = api, identity, keys, namespace
        self._defaults = defaults
        self.jobs = Store(job_key, lean_job)
        self.pods = Store(pod_key, lean_pod)
        self.pools = KubePools(api, identity, keys, namespace, defaults, self.jobs)
        self._watched = (
            (self.jobs, KIND, ""),
            (self.pods, "Pod", names.LABEL_JOB),
            *self.pools.watched,
        )
        self._owned = OwnedObjects(
            api, keys, self._pods, supporting_objects, partial(optional_objects.read, api)
        )
        self._warnings = PodWarnings(api)
        self._server_warnings = ServerWarnings()
        self._workloads = Workloads(api)
        self._sandboxes = Sandboxes(api)
        self._ending_namespaces: set[str] = set()

    # -- Cluster
    # ----------------------------------------------------------------------------------------------

    async def observe(self, job: RLJob) -> Observed:
        is_first_look = not self._owned.cached(job.metadata.uid).read
        owned = await self._owned.read(job)
        if owned.absent and is_first_look and not (job.status and job.status.observed_generation):
            await self.emit(job, [optional_objects.missing(owned.absent)])
        pool = pool_of_job.facts(job, self.pools.store)
        if lacks_pods(with_workers(job, pool, job.status), self._pods(job)):
            await self._reread_pods(job)
        warned = await self._warnings.about(_key(job), self._pods(job))
        fetching = await fetch_logs.progress_of(self.api, job.metadata.namespace, self._pods(job))
        workloads = await self._workloads.waited_for(job, self._pods(job))
        sandbox_version, sandboxes = await self._sandboxes.of_job(job, self._pods(job))
        stored_status.check_fresh(self.jobs, job)
        pods, objects = tuple(self._pods(job)), dict(owned.objects) | dict(workloads)
        return Observed(
            pods,
            objects,
            job.status,
            absent_kinds=owned.absent,
            operator_namespace=self.namespace,
            warned=warned,
            fetching=fetching,
            sandboxes=sandboxes,
            sandbox_version=sandbox_version,
            defaults=self._defaults,
            pool=pool,
        )

    async def write_status(self, job: RLJob, status: RLJobStatus) -> None:
        stored_status.check_fresh(self.jobs, job)
        stored = self.stored(_key(job))
        if stored is not None:
            await self.store_status(stored, status)

    async def apply(self, job: RLJob, objects: Sequence[KubeObject]) -> None:
        """Create objects: first those that pods need, then all pods at the same time."""
        warnings: list[ServerWarning] = []
        makers = {"Pod": self._create_pod, names.SANDBOX: self._sandboxes.create}
        try:
            others = [manifest for manifest in objects if manifest["kind"] not in makers]
            await _all(
                [
                    self._owned.apply(job, manifest, collector(warnings, manifest))
                    for manifest in others
                ]
            )
            pods = [manifest for manifest in objects if manifest["kind"] in makers]
            await _all([makers[pod["kind"]](job, pod, collector(warnings, pod)) for pod in pods])
        except errors.NamespaceEndingError:
            self._ending_namespaces.add(job.metadata.namespace)
            raise
        finally:
            await self.emit(job, self._server_warnings.news(job.metadata.uid, warnings))

    async def delete(self, job: RLJob, deletions: Sequence[Deletion]) -> None:
        await _all([self._delete(job, deletion) for deletion in deletions])

    async def emit(self, job: RLJob, events: Sequence[Event]) -> None:
        stored = self.stored(_key(job))
        if stored is not None:
            await self.tell(stored, events)

    # -- jobs as they are stored
    # --------------------------------------------------------------------------------------

    def stored(self, key: JobKey) -> KubeObject | None:
        return self.jobs.newest(key)

    def all_keys(self) -> list[JobKey]:
        """Return the keys of all jobs, and of deleted jobs that have pods left."""
        return list({*self.jobs.all_keys(), *self.pods.all_keys()})

    def namespaces(self) -> set[str]:
        """Return the namespaces that have jobs, pods of deleted jobs, or pools."""
        return {namespace for namespace, _ in [*self.all_keys(), *self.pools.store.all_keys()]}

    async def config(self, stored: KubeObject) -> KubeObject | None:
        """Return the ConfigMap with the manifest that the job's pods were started with.

        None if no pod was started.
        """
        return await self._owned.config(stored)

    def pods_of(self, stored: KubeObject) -> list[KubeObject]:
        return [pod for pod in self.pods.of_job(job_key(stored)) if job_uid(pod) == uid(stored)]

    def owned(self, stored: KubeObject) -> Mapping[tuple[str, str], KubeObject]:
        """Return the job's objects except pods, as they were last read."""
        return self._owned.cached(uid(stored)).objects

    async def store_status(self, stored: KubeObject, status: RLJobStatus) -> None:
        """Write the status, unless it is equal to the stored one."""
        warnings: list[ServerWarning] = []
        whole = {"kind": KIND, **stored}
        listener = collector(warnings, whole)
        await stored_status.write(self.api, self.jobs, whole, status, listener, self.forget)
        await self.tell(stored, self._server_warnings.news(uid(stored), warnings))

    async def tell(self, stored: KubeObject, events: Sequence[Event]) -> None:
        """Create events about a job."""
        await post(self.api, stored, events, self.identity)

    def forget(self, stored: KubeObject) -> None:
        """Forget a job that is gone."""
        self.jobs.bury(stored)
        self._warnings.forget(job_key(stored))
        self._server_warnings.forget(uid(stored))
        self._owned.forget(uid(stored))
        self._sandboxes.forget(uid(stored))

    async def prime(self, namespaces: Sequence[str | None]) -> None:
        """Read all jobs, pools and pods before the first pass.

        A job that is planned before its pods have been read would lose them.
        """
        for namespace in namespaces:
            for store, kind, selector in self._watched:
                async for page in self.api.pages(collection(kind, namespace), selector):
                    for item in page["items"] or []:
                        store.put({**item, "kind": kind})

    async def resync(self, namespaces: Sequence[str | None]) -> list[KubeObject]:
        """Compare the memory with the server's lists, and return the objects that are gone.

        A watch that was interrupted for too long starts again with what exists, and never reports
        what was deleted in the meantime.
        """
        lost: list[KubeObject] = []
        for namespace in namespaces:
            for store, kind, selector in self._watched:
                uids, version = await self.api.list_uids(collection(kind, namespace), selector)
                gone = store.sweep(uids, version, namespace)
                lost += [{**stored, "kind": kind} for stored in gone]
        return lost

    # -- pods
    # ----------------------------------------------------------------------------------------------

    def _pods(self, job: RLJob) -> list[KubeObject]:
        return [pod for pod in self.pods.of_job(_key(job)) if job_uid(pod) == job.metadata.uid]

    async def _reread_pods(self, job: RLJob) -> None:
        """Read the pods of a job that seems to lack some.

        The watch of pods may lag behind that of jobs. Otherwise a new leader would take the pods
        that its predecessor has just created for lost, and restart whole jobs for no reason.
        """
        selector = names.selector_text(names.selector(job))
        async for page in self.api.pages(collection("Pod", job.metadata.namespace), selector):
            for item in page["items"] or []:
                self.pods.put({**item, "kind": "Pod"})

    async def _create_pod(
        self, job: RLJob, manifest: KubeObject, warned: Callable[[str], None]
    ) -> None:
        name, namespace = manifest["metadata"]["name"], job.metadata.namespace
        try:
            stored = await self.api.create(collection("Pod", namespace), manifest, warned)
        except errors.AlreadyExistsError:
            stored = await self.api.get(path("Pod", namespace, name))
            check_owner(job, "Pod", name, stored)
        self._ending_namespaces.discard(namespace)
        self.pods.put(stored)

    async def _delete(self, job: RLJob, deletion: Deletion) -> None:
        if deletion.kind == "RLJob":
            options = {
                "propagationPolicy": "Background",
                "preconditions": {"uid": job.metadata.uid},
            }
            with contextlib.suppress(errors.NotFoundError, errors.ConflictError):
                await self.api.delete(
                    path("RLJob", job.metadata.namespace, job.metadata.name), options
                )
            return
        if deletion.kind == names.WORKLOAD:
            await self._end_group(deletion.name, self._pods(job))
            return
        if deletion.kind == names.SANDBOX:
            await self._sandboxes.delete(job, deletion.name, self._pods(job))
            return
        if deletion.kind in optional_objects.KINDS:
            await self._owned.delete(job, deletion)
            return
        for pod in self._pods(job):
            if pod["metadata"]["name"] == deletion.name:
                await self._delete_pod(pod, deletion.grace)

    async def _delete_pod(self, pod: KubeObject, grace: int) -> None:
        namespace, name = job_key(pod)
        options = {"gracePeriodSeconds": grace, "preconditions": {"uid": uid(pod)}}
        try:
            if grace == 0 and podstate.is_kept(pod):
                self.pods.put(await self._workloads.give_up(pod))
            answer = await self.api.delete(path("Pod", namespace, name), options)
        except (errors.NotFoundError, errors.ConflictError):
            # The pod is gone; after a conflict another one has its name.
            self.pods.bury(pod)
            return
        if answer.get("kind") == "Pod" and answer["metadata"].get("deletionTimestamp"):
            self.pods.put(answer)
        else:
            self.pods.put(_terminating(pod, answer, grace))

    async def release(self, key: JobKey) -> None:
        """Tell Kueue that pods of a deleted job will not be replaced, so that it lets them go.

        A job is also deleted with its namespace. Kubernetes deletes the pods of a namespace first,
        when the job has no deletion timestamp yet; a refused creation shows it.
        """
        stored = self.stored(key)
        lives = (
            stored is not None
            and not stored["metadata"].get("deletionTimestamp")
            and key[0] not in self._ending_namespaces
        )
        left = [
            pod
            for pod in self.pods.of_job(key)
            if not (lives and stored and job_uid(pod) == uid(stored))
        ]
        for deletion in finished_groups(left):
            await self._end_group(deletion.name, left)

    async def _end_group(self, group: str, pods: Sequence[KubeObject]) -> None:
        members = pods_by_group(pods).get(group)
        if members:
            await self._workloads.end(group, members)


def job_key(stored: Mapping[str, Any]) -> JobKey:
    """Return (namespace, name) of a stored object."""
    return stored["metadata"]["namespace"], stored["metadata"]["name"]


def pod_key(pod: Mapping[str, Any]) -> JobKey | None:
    job = (pod["metadata"].get("labels") or {}).get(names.LABEL_JOB)
    return (pod["metadata"]["namespace"], job) if job else None


def _key(job: RLJob) -> JobKey:
    return job.metadata.namespace, job.metadata.name


def _terminating(pod: KubeObject, answer: KubeObject, grace: int) -> KubeObject:
    """Return a pod that the server deleted at once, marked as terminating.

    It counts as terminating until a watch reports that it is gone.
    """
    moment = clock.text(datetime.now(UTC) + timedelta(seconds=grace))
    newest = max(version(pod) + 1, version(answer) if "metadata" in answer else 0)
    metadata = pod["metadata"] | {"deletionTimestamp": moment, "resourceVersion": str(newest)}
    return {**pod, "metadata": metadata}


async def _all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all calls at the same time until each has ended, then raise the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
