"""Objects of one kind as this process knows them: the memory between a watch and the reconciler.

Two sources fill it: watches, and the answers to this process's own writes. The newest version of an
object wins, whoever brought it, so reads see our own writes although the watch lags behind. An
object that is known to be gone never comes back: its uid is remembered for longer than any watch
can lag.
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
    "containerStatuses": ("name", "state", "lastState"),
}
GRAVES_SECONDS = 600.0


class Store:
    """key_of: the job that an object belongs to; None: to none, and it is not kept. lean: what of
    an object is kept.
    """

    def __init__(
        self,
        key_of: Callable[[KubeObject], JobKey | None],
        lean: Callable[[KubeObject], KubeObject],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key_of, self._lean, self._clock = key_of, lean, clock
        self._objects: dict[JobKey, dict[str, KubeObject]] = defaultdict(dict)
        self._graves: dict[str, float] = {}

    def put(self, stored: KubeObject) -> bool:
        """Take an object, unless it is older than what is known. True: something changed."""
        key, stored_uid = self._key_of(stored), uid(stored)
        if key is None or stored_uid in self._graves:
            return False
        before = self._objects[key].get(stored_uid)
        if before is not None and version(before) >= version(stored):
            return False
        self._objects[key][stored_uid] = self._lean(stored)
        return True

    def bury(self, stored: KubeObject) -> bool:
        """The object is gone for ever. True: it was known."""
        self._graves[uid(stored)] = self._clock()
        self._forget_old_graves()
        key = self._key_of(stored)
        if key is None or key not in self._objects:
            return False
        known = self._objects[key].pop(uid(stored), None) is not None
        if not self._objects[key]:
            del self._objects[key]
        return known

    def of(self, key: JobKey) -> list[KubeObject]:
        return list(self._objects.get(key, {}).values())

    def newest(self, key: JobKey) -> KubeObject | None:
        """Where one name has had several lives, the present one."""
        return max(self.of(key), key=version, default=None)

    def all_keys(self) -> list[JobKey]:
        return list(self._objects)

    def sweep(self, listed: Set[str], at: int, namespace: str | None = None) -> list[KubeObject]:
        """Bury what a list of version `at` lacks:
        objects that vanished while no watch was looking.
        """
        lost = [
            stored
            for key, objects in self._objects.items()
            for stored in objects.values()
            if namespace in (None, key[0]) and version(stored) <= at and uid(stored) not in listed
        ]
        return [stored for stored in lost if self.bury(stored)]

    def _forget_old_graves(self) -> None:
        """Graves are in the order of time."""
        limit = self._clock() - GRAVES_SECONDS
        while self._graves:
            oldest = next(iter(self._graves))
            if self._graves[oldest] > limit:
                return
            del self._graves[oldest]


def lean_pod(pod: KubeObject) -> KubeObject:
    """The parts of a pod that the planner reads: ten thousand whole pods in memory would take half
    a gigabyte.
    """
    whole = pod.get("status") or {}
    lists = {
        name: [_only(each, kept) for each in whole[name]]
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
    """The parts of a Sandbox that the planner reads: not the pod template."""
    conditions = (sandbox.get("status") or {}).get("conditions") or []
    kept = [_only(each, _POD_LISTS["conditions"]) for each in conditions]
    metadata = _only(sandbox["metadata"], _POD_METADATA)
    return compact({"kind": names.SANDBOX, "metadata": metadata, "status": {"conditions": kept}})


def _annotations(pod: KubeObject) -> KubeObject:
    """The one that the planner reads; others may be large."""
    kept = _only(pod["metadata"].get("annotations") or {}, (names.ENDS_GROUP,))
    return {"annotations": kept} if kept else {}


def lean_job(job: KubeObject) -> KubeObject:
    """All but what others keep in a job's metadata, which may be another copy of the whole spec."""
    metadata = {
        key: value
        for key, value in job["metadata"].items()
        if key not in ("managedFields", "annotations")
    }
    return compact({**job, "metadata": metadata})


def compact(stored: KubeObject) -> KubeObject:
    """The same object, but each distinct text is in memory once: objects of a kind share keys and
    most values.
    """
    return {sys.intern(key): _compact(value) for key, value in stored.items()}


def _compact(value: Any) -> Any:
    if isinstance(value, dict):
        return compact(value)
    if isinstance(value, list):
        return [_compact(each) for each in value]
    return sys.intern(value) if type(value) is str else value


def _only(mapping: Mapping[str, Any], kept: Sequence[str]) -> dict[str, Any]:
    return {key: mapping[key] for key in kept if key in mapping}


def version(stored: KubeObject) -> int:
    """Versions of one kind's objects can be compared (KEP-5504): they are numbers in every
    etcd-backed server.
    """
    return int(stored["metadata"].get("resourceVersion") or 0)


def owner_uid(stored: KubeObject) -> str:
    """Uid of the object's controller; empty: it has none."""
    owners = stored["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def job_uid(pod: KubeObject) -> str:
    """Uid of the job that a pod belongs to; empty: to none. Of a Sandbox's pod a label says it."""
    if podstate.sandbox(pod):
        return podstate.labels(pod).get(names.LABEL_UID, "")
    return owner_uid(pod)
