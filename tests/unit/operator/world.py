"""A cluster in memory that carries plans out.

Pods start, end and vanish, and time passes, when a test says so.
"""

from __future__ import annotations

from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

from sluice.api import RLJob, RLJobStatus, manifest
from sluice_operator.plan import Event, KubeObject, Observed, Plan, Progress, plan
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import KubeletWarning, PoolFacts

START = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


def make_job(**spec: Any) -> RLJob:
    """A small CPU job; groups of the spec are merged over it, one level deep."""
    document: dict[str, Any] = {
        "model": {"path": "/models/tiny"},
        "data": {"prompts": [{"path": "/data/train.jsonl"}]},
        "reward": {"type": "exact_match"},
        "rollout": {"gpusPerReplica": 0},
        "trainer": {"steps": 10, "gpusPerNode": 0},
    }
    for group, fields in spec.items():
        both = isinstance(document.get(group), dict) and isinstance(fields, dict)
        document[group] = document[group] | fields if both else fields
    return RLJob.model_validate({"metadata": {"name": "demo", "uid": "1234"}, "spec": document})


def make_pod(
    role: str = "trainer",
    *,
    replica: int = 0,
    attempt: int = 1,
    index: int = 0,
    phase: str = "Running",
    ends: dict[str, int] | None = None,
    message: str = "",
    at: datetime = START,
    **status: Any,
) -> KubeObject:
    """Return a pod as an API server shows it.

    ends: exit codes by container; the role's other containers run.
    """
    labels = {
        "job-name": "demo",
        "role": role,
        "replica": str(replica),
        "attempt": str(attempt),
        "index": str(index),
    }
    names = ["engine", "worker"] if role == "rollout" else [role]
    states = [_container(name, (ends or {}).get(name), phase, message, at) for name in names]
    ready = phase == "Running" and not ends
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"demo-{role}-{replica}-{attempt}-{index}",
            "labels": {f"sluice.dev/{key}": value for key, value in labels.items()},
        },
        "spec": {},
        "status": {
            "phase": phase,
            "startTime": clock.text(at),
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": states,
            **status,
        },
    }


def _container(
    name: str, code: int | None, phase: str, message: str, at: datetime
) -> dict[str, Any]:
    if code is None:
        return {"name": name, "state": {"running": {}} if phase == "Running" else {"waiting": {}}}
    end = {
        "exitCode": code,
        "reason": "Completed" if code == 0 else "Error",
        "finishedAt": clock.text(at),
    }
    return {"name": name, "state": {"terminated": end | ({"message": message} if message else {})}}


def job_pass(job: RLJob, observed: Observed, now: datetime = START) -> JobPass:
    return JobPass(job, observed.status or RLJobStatus(), observed, now)


class World:
    """Applies plans in the reconciler's order, through JSON, as a real store would keep them."""

    def __init__(self, job: RLJob) -> None:
        self.job = job
        self.now = START
        self.pods: dict[str, KubeObject] = {}
        self.objects: dict[tuple[str, str], KubeObject] = {}
        self.stored: dict[str, Any] | None = None
        self.progress: Progress | None = None
        self.note = ""
        self.events: list[Event] = []
        self.job_deleted = False
        self.seen: set[str] = set()
        self.gated_roles: tuple[str, ...] = ()
        self.warned: dict[str, KubeletWarning] = {}
        self.pool: PoolFacts | None = None

    @property
    def status(self) -> RLJobStatus:
        return RLJobStatus.model_validate(self.stored or {})

    def observed(self) -> Observed:
        status = RLJobStatus.model_validate(self.stored) if self.stored is not None else None
        pods = tuple(deepcopy(list(self.pods.values())))
        return Observed(
            pods,
            self.objects,
            status,
            self.progress,
            warned=self.warned,
            note=self.note,
            pool=self.pool,
        )

    def plan(self) -> Plan:
        return plan(self.job, self.observed(), self.now)

    def step(self, *, delete: bool = False, create: int | None = None) -> Plan:
        """Make one pass.

        delete: the operator crashes before it deletes. create: it crashes after so many creations.
        """
        self.seen |= set(self.pods)
        decision = self.plan()
        self.stored = manifest(decision.status)
        if delete:
            return decision
        for deletion in decision.delete:
            if deletion.kind == "RLJob":
                self.job_deleted = True
            elif deletion.kind != "Pod":
                del self.objects[deletion.kind, deletion.name]
            else:
                self._delete(deletion.name, deletion.grace)
        for item in decision.create[:create]:
            self._create(item)
        if create is not None:
            return decision
        self.events += decision.events
        return decision

    def settle(self, passes: int = 20) -> None:
        """Make passes until no object changes; pods start and end at once."""
        for _ in range(passes):
            before = (self.stored, sorted(self.pods))
            self.step()
            self.remove_terminating()
            self.start_pods()
            if (self.stored, sorted(self.pods)) == before:
                return
        raise AssertionError(f"no rest after {passes} passes: {sorted(self.pods)}")

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def start_pods(self) -> None:
        for name, pod in self.pods.items():
            if pod["status"]["phase"] == "Pending" and not podstate.is_gated(pod):
                self.replace(name, phase="Running")

    def end(self, name: str, code: int, container: str = "", message: str = "") -> None:
        """A container ends; without a container: all of the pod's."""
        pod = self.pods[name]
        names = [status["name"] for status in pod["status"]["containerStatuses"]]
        ended = [container] if container else names
        phase = "Running" if len(ended) < len(names) else "Failed" if code else "Succeeded"
        self.replace(name, phase=phase, ends=dict.fromkeys(ended, code), message=message)

    def disrupt(self, name: str) -> None:
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
        }
        self.pods[name]["status"]["conditions"].append(condition)

    def vanish(self, name: str) -> None:
        del self.pods[name]

    def remove_terminating(self) -> None:
        self.pods = {
            name: pod for name, pod in self.pods.items() if not podstate.is_terminating(pod)
        }

    def replace(self, name: str, **change: Any) -> None:
        old = self.pods[name]
        place: dict[str, Any] = {
            "replica": podstate.replica(old),
            "attempt": podstate.attempt(old),
            "index": podstate.index(old),
        }
        started = podstate.started(old) if podstate.is_running(old) else self.now
        new = make_pod(podstate.role(old), **place, **change, at=self.now)
        new["status"]["startTime"] = clock.text(started or self.now)
        kept = ("deletionTimestamp", "finalizers", "labels")
        new["metadata"] |= {key: old["metadata"][key] for key in kept if key in old["metadata"]}
        self.pods[name] = new

    def names(self, role: str = "") -> list[str]:
        return sorted(name for name, pod in self.pods.items() if role in ("", podstate.role(pod)))

    def _create(self, body: KubeObject) -> None:
        name = body["metadata"]["name"]
        if body["kind"] != "Pod":
            stored = deepcopy(body)
            if body["kind"] == "Service":
                stored["spec"]["clusterIP"] = "10.0.0.1"
            self.objects[body["kind"], name] = stored
            return
        assert name not in self.pods, f"{name} is created twice"
        assert name not in self.seen, (
            f"{name} is created again: two executions would share an attempt"
        )
        labels = {
            key.rpartition("/")[2]: value for key, value in body["metadata"]["labels"].items()
        }
        place: dict[str, Any] = {key: int(labels[key]) for key in ("replica", "attempt", "index")}
        self.pods[name] = make_pod(labels["role"], **place, phase="Pending")
        del self.pods[name]["status"]["startTime"]
        self.pods[name]["metadata"]["labels"] |= body["metadata"]["labels"]
        if labels["role"] in self.gated_roles:
            self.pods[name]["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]

    def admit(self, *roles: str) -> None:
        """The queue lets pods of these roles go."""
        for pod in self.pods.values():
            if podstate.role(pod) in roles:
                pod["spec"].pop("schedulingGates", None)

    def _delete(self, name: str, grace: int) -> None:
        if grace == 0:
            self.pods.pop(name, None)
        elif name in self.pods:
            moment = self.now + timedelta(seconds=grace)
            self.pods[name]["metadata"].setdefault("deletionTimestamp", clock.text(moment))


def settled(**spec: Any) -> World:
    """A world in which the job's pods run."""
    world = World(make_job(**spec))
    world.settle()
    return world
