"""Memory of the objects of one kind, between a watch and the reconciler.

Watches and the answers to this process's own writes fill it. The newest version of an object wins,
so reads see the process's own writes although the watch lags behind. An object that is gone never
comes back, because its uid is remembered for longer than a watch can lag.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import JobKey, KubeObject, uid

_POD_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences", "creationTimestamp",
    "deletionTimestamp", "finalizers",
)  # fmt: skip
_POD_SPEC = ("nodeName", "schedulingGates", "terminationGracePeriodSeconds")
_POD_STATUS = ("phase", "reason", "message", "startTime", "podIP")
_POD_LISTS = {
    "conditions": ("type", "status", "reason", "message"),
    "initContainerStatuses": ("name", "state", "lastState"),
    "containerStatuses": ("name", "state", "lastState", "imageID"),
}
GRAVES_SECONDS = 600.0


class Store:
    """The objects of one kind, by job."""

    def __init__(
        self,
        key_of: Callable[[KubeObject], JobKey | None],
        lean: Callable[[KubeObject], KubeObject],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty store.

        Parameters
        ----------
        key_of
            Returns the job that an object belongs to; None if the object should not be kept.
        lean
            Returns the part of an object that is kept.
        clock
            Monotonic seconds.

        """
        self._key_of, self._lean, self._clock = key_of, lean, clock
        self._objects: dict[JobKey, dict[str, KubeObject]] = defaultdict(dict)
        self._graves: dict[str, float] = {}

    def put(self, stored: KubeObject) -> bool:
        """Add an object unless a newer version is stored. Return True if it was added."""
        key, stored_uid = self._key_of(stored), uid(stored)
        if key is None or stored_uid in self._graves:
            return False
        before = self._objects[key].get(stored_uid)
        if before is not None and version(before) >= version(stored):
            return False
        self._objects[key][stored_uid] = self._lean(stored)
        return True

    def bury(self, stored: KubeObject) -> bool:
        """Remove an object for ever. Return True if it was stored."""
        self._graves[uid(stored)] = self._clock()
        self._forget_old_graves()
        key = self._key_of(stored)
        if key is None or key not in self._objects:
            return False
        was_stored = self._objects[key].pop(uid(stored), None) is not None
        if not self._objects[key]:
            del self._objects[key]
        return was_stored

    def of_job(self, key: JobKey) -> list[KubeObject]:
        return list(self._objects.get(key, {}).values())

    def newest(self, key: JobKey) -> KubeObject | None:
        """Return the newest of the objects that have had this name."""
        return max(self.of_job(key), key=version, default=None)

    def all_keys(self) -> list[JobKey]:
        return list(self._objects)

    def sweep(
        self, listed: Set[str], list_version: int, namespace: str | None = None
    ) -> list[KubeObject]:
        """Remove objects that were deleted while no watch was active, and return them.

        Parameters
        ----------
        listed
            Uids of all objects that exist.
        list_version
            Version of that list. Objects that are newer stay.
        namespace
            Namespace of the list; None for all namespaces.

        """
        lost = [
            stored
            for key, objects in self._objects.items()
            for stored in objects.values()
            if namespace in (None, key[0])
            and version(stored) <= list_version
            and uid(stored) not in listed
        ]
        return [stored for stored in lost if self.bury(stored)]

    def _forget_old_graves(self) -> None:
        # Graves are in the order of time.
        limit = self._clock() - GRAVES_SECONDS
        while self._graves:
            oldest = next(iter(self._graves))
            if self._graves[oldest] > limit:
                return
            del self._graves[oldest]


def lean_pod(pod: KubeObject) -> KubeObject:
    """Return the parts of a pod that the planner reads.

    Ten thousand whole pods would take half a gigabyte of memory.
    """
    whole = pod.get("status") or {}
    lists = {
        name: [_only(entry, kept) for entry in whole[name]]
        for name, kept in _POD_LISTS.items()
        if whole.get(name)
    }
    lean = {
        "kind": "Pod",
        "metadata": _only(pod["metadata"], _POD_METADATA) | _annotations(pod),
        "spec": _only(pod.get("spec") or {}, _POD_SPEC),
        "status": _only(whole, _POD_STATUS) | lists,
    }
    return compact(lean)


def lean_sandbox(sandbox: KubeObject) -> KubeObject:
    """Return the parts of a Sandbox that the planner reads, without the pod template."""
    conditions = (sandbox.get("status") or {}).get("conditions") or []
    kept = [_only(condition, _POD_LISTS["conditions"]) for condition in conditions]
    metadata = _only(sandbox["metadata"], _POD_METADATA) | _annotations(sandbox)
    return compact({"kind": names.SANDBOX, "metadata": metadata, "status": {"conditions": kept}})


def _annotations(pod: KubeObject) -> KubeObject:
    # Only annotations that the planner reads; others may be large.
    annotations = pod["metadata"].get("annotations") or {}
    kept = _only(annotations, (names.ENDS_GROUP, names.ROW_IMAGE))
    return {"annotations": kept} if kept else {}


def lean_job(job: KubeObject) -> KubeObject:
    """Return a job without the fields of its metadata that may hold another copy of its spec."""
    metadata = {
        key: value
        for key, value in job["metadata"].items()
        if key not in ("managedFields", "annotations")
    }
    return compact({**job, "metadata": metadata})


def compact(stored: KubeObject) -> KubeObject:
    """Return the object with interned texts, because objects of a kind share most of them."""
    return {sys.intern(key): _compact(value) for key, value in stored.items()}


def _compact(value: Any) -> Any:
    if isinstance(value, dict):
        return compact(value)
    if isinstance(value, list):
        return [_compact(item) for item in value]
    return sys.intern(value) if type(value) is str else value


def _only(mapping: Mapping[str, Any], kept: Sequence[str]) -> dict[str, Any]:
    return {key: mapping[key] for key in kept if key in mapping}


def version(stored: KubeObject) -> int:
    # Versions of the objects of one kind can be compared (KEP-5504): they are numbers in every
    # server with etcd.
    return int(stored["metadata"].get("resourceVersion") or 0)


def owner_uid(stored: KubeObject) -> str:
    """Return the uid of the object's controller; empty if it has none."""
    owners = stored["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def job_uid(pod: KubeObject) -> str:
    """Return the uid of the job that a pod belongs to; empty if it belongs to none."""
    # A Sandbox's pod is owned by the Sandbox, so a label names the job.
    if podstate.sandbox(pod):
        return podstate.labels(pod).get(names.LABEL_UID, "")
    return owner_uid(pod)
