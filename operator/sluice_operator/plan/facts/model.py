"""Input and output of the planner: frozen values, so that decisions can be tested in tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from sluice.api import LastFailure, RLJobStatus, RoleName
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS, JobDefaults

KubeObject = dict[str, Any]  # a Kubernetes object as plain data
JobKey = tuple[str, str]  # (namespace, name) of a job


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Namespace and name of an RLEnginePool."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The job's progress, from the buffer's statistics and the rendezvous' ledger."""

    step: int  # last committed step
    total_steps: int | None = None
    reward: float | None = None
    version: int | None = None
    lag: float | None = None
    # Engines that have joined the rendezvous, and those of them that hold the newest weights.
    engines: int = 0
    engines_in_sync: int = 0
    loss: float | None = None
    # The last engine that was dropped from an update and is still behind, and why; or empty.
    dropped: str = ""
    # Both grow all the time, so they do not make two answers different.
    device_seconds: Mapping[str, float] = field(default_factory=dict, compare=False)  # role/state
    counters: Mapping[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class WorkerDemand:
    """The pods that a worker waits for, if rows name the images of pods."""

    waiting: tuple[tuple[str, str, int], ...] = ()  # role, image, number of episodes that wait
    joined: frozenset[str] = frozenset()  # names of the pods that have joined the worker


WorkerDemands = Mapping[tuple[int, int], WorkerDemand]  # by replica and attempt of the worker
NO_DEMANDS: WorkerDemands = {}


@dataclass(frozen=True, slots=True)
class KubeletWarning:
    """The latest warning of a kubelet about a pod that does not start."""

    reason: str
    message: str
    times: int = 1  # how often it was repeated


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The pool of engines that a job uses, as its cluster reports it."""

    name: str
    replicas: int = 0  # number of engines
    addresses: tuple[str, ...] = ()  # host:port of engine i
    # Why the job cannot use the pool, and what to do; empty if it can.
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """A job's objects as the cluster reports them."""

    pods: tuple[KubeObject, ...] = ()
    # Objects that the job owns, except pods, by (kind, name).
    objects: Mapping[tuple[str, str], KubeObject] = field(default_factory=dict)
    status: RLJobStatus | None = None  # the stored one
    progress: Progress | None = None  # None while the buffer does not answer
    # Pods that workers wait for; empty unless rows name the images of pods.
    demands: WorkerDemands = field(default_factory=dict)
    absent_kinds: frozenset[str] = frozenset()  # kinds that this cluster does not serve
    operator_namespace: str | None = None  # None if the operator does not run in a cluster
    warned: Mapping[str, KubeletWarning] = field(default_factory=dict)  # by pod name
    # How far pods are that fetch files, by pod name, as far as their logs tell.
    fetching: Mapping[str, str] = field(default_factory=dict)
    # Sandboxes of the job if it asks for them, and the version of their API; empty if the cluster
    # does not serve it.
    sandboxes: tuple[KubeObject, ...] = ()
    sandbox_version: str = ""
    defaults: JobDefaults = NO_DEFAULTS
    pool: PoolFacts | None = None  # None unless the job names a pool
    # A problem that the planner does not see, such as a refused change of the spec. It is part of
    # the status because events are gone after an hour.
    note: str = ""
    # Pods of episodes and verifiers, once the planner has separated them from `pods`.
    episodes: tuple[KubeObject, ...] = ()


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object to delete. grace: a pod's seconds between SIGTERM and SIGKILL; 0 means by force."""

    kind: str
    name: str
    grace: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one pass, to be carried out in this order: status, deletions, creations, events.

    requeue_after: seconds after which the plan may change although the cluster does not.
    """

    status: RLJobStatus
    create: tuple[KubeObject, ...] = ()
    delete: tuple[Deletion, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None


@dataclass(frozen=True, slots=True)
class Gang:
    """Pods that start and end together."""

    role: RoleName
    replica: int
    size: int  # number of pods

    @property
    def name(self) -> str:
        return f"{self.role}-{self.replica}"


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Pods that a queue admits together. alone: the group of one attempt of one gang only."""

    name: str
    size: int  # number of pods
    alone: bool = False


@dataclass(frozen=True, slots=True)
class GangFacts:
    """The present attempt of a gang, read from its pods."""

    # Numbers of pods.
    seen: int = 0
    ready: int = 0
    running: int = 0
    succeeded: int = 0
    missing: tuple[int, ...] = ()  # indices without a pod
    failure: LastFailure | None = None
    config_error: LastFailure | None = None  # a container asked not to be restarted (exit code 2)
    disruption: str = ""  # what the cluster did to a pod, in words
    started: datetime | None = None  # start of the first pod


@dataclass(frozen=True, slots=True)
class Images:
    """Container images, which the chart sets.

    A rollout pod has an engine's image (`engine` for SGLang, `vllm` for vLLM, `trainer` for
    transformers) and sluice's own worker image (`rollout`).
    """

    trainer: str = "ghcr.io/sluice-dev/sluice-trainer:0.1.0"
    engine: str = "docker.io/lmsysorg/sglang:v0.5.17-cu130-runtime"
    vllm: str = "docker.io/vllm/vllm-openai:v0.32.0"
    rollout: str = "ghcr.io/sluice-dev/sluice-rollout:0.1.0"
    buffer: str = "ghcr.io/sluice-dev/sluice-buffer:0.1.0"
    rendezvous: str = "ghcr.io/sluice-dev/sluice-buffer:0.1.0"

    def of_engine(self, engine: str) -> str:
        """Return the image of an engine by its name in `rollout.engine`."""
        return {"vllm": self.vllm, "transformers": self.trainer}.get(engine, self.engine)


def uid(stored: KubeObject) -> str:
    """Return the uid, which tells an object from a later one of the same name."""
    return str(stored["metadata"]["uid"])
