"""The planner's input and output: plain frozen values,
so that every decision can be tested in a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from sluice.api import LastFailure, RLJobStatus, RoleName
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS, JobDefaults

KubeObject = dict[str, Any]
"""A Kubernetes object as plain data: a pod, a service, a config map, a secret, a claim."""
JobKey = tuple[str, str]
"""(namespace, name of the job)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The job's progress, by the buffer's Stats and the rendezvous' ledger.

    step: last committed step; engines: engines that the rendezvous knows; engines_in_sync: those of
    them that hold the newest weights. dropped: the newest reason for which one of the others was
    dropped from an update, with its name; empty: none was. device_seconds: by `role/state`, since
    the rendezvous service started; counters: the buffer's. Both grow all the time: they make no
    answer a new one.
    """

    step: int
    total_steps: int | None = None
    reward: float | None = None
    version: int | None = None
    lag: float | None = None
    engines: int = 0
    engines_in_sync: int = 0
    loss: float | None = None
    dropped: str = ""
    device_seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    counters: Mapping[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class KubeletWarning:
    """The last warning of a kubelet about a pod that does not start. times: how often it has."""

    reason: str
    message: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class Observed:
    """The world as a cluster reports it.

    objects: what the job owns besides pods, by (kind, name). progress: None while the buffer cannot
    be asked. absent_kinds: kinds that this cluster does not know. operator_namespace: where the
    operator runs; None: in no cluster. warned: pod -> what its kubelet warns of while it does not
    start. sandboxes: the job's Sandboxes, where it asks for those; sandbox_version: the version of
    their API to speak, empty: the cluster has none. defaults: those of the whole cluster. note:
    what stands in the job's way besides, such as a change that is refused; events of it are gone
    after an hour. episodes: the pods of episodes and verifiers, once the planner has split them
    from those of gangs.
    """

    pods: tuple[KubeObject, ...] = ()
    objects: Mapping[tuple[str, str], KubeObject] = field(default_factory=dict)
    status: RLJobStatus | None = None
    progress: Progress | None = None
    absent_kinds: frozenset[str] = frozenset()
    operator_namespace: str | None = None
    warned: Mapping[str, KubeletWarning] = field(default_factory=dict)
    sandboxes: tuple[KubeObject, ...] = ()
    sandbox_version: str = ""
    defaults: JobDefaults = NO_DEFAULTS
    note: str = ""
    episodes: tuple[KubeObject, ...] = ()


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object to delete. grace: of a pod, seconds between SIGTERM and SIGKILL; 0: at once."""

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
    """The work of one pass. The order is fixed: status, deletions, creations, events.

    requeue_after: seconds until time alone changes the plan; None: only a change of the world does.
    """

    status: RLJobStatus
    create: tuple[KubeObject, ...] = ()
    delete: tuple[Deletion, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None


@dataclass(frozen=True, slots=True)
class Gang:
    """Pods that start and die together. size: number of its pods."""

    role: RoleName
    replica: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.replica}"


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Pods that a queue admits as one. size: their number. alone: it is one attempt of one gang,
    and ends with it.
    """

    name: str
    size: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class GangFacts:
    """One gang's present attempt, read from its pods.

    seen, ready, succeeded: how many of its pods exist, are ready, have done their work.
    missing: indices without a pod. config_error: a container asked not to be restarted (exit
    code 2). disruption: what the cluster did to a pod, in words; empty: nothing. started: when
    its first pod started.
    """

    seen: int = 0
    ready: int = 0
    running: int = 0
    succeeded: int = 0
    missing: tuple[int, ...] = ()
    failure: LastFailure | None = None
    config_error: LastFailure | None = None
    disruption: str = ""
    started: datetime | None = None


@dataclass(frozen=True, slots=True)
class Images:
    """Container images of the roles; the chart sets them.

    engine: the default engine's own, beside our worker (rollout). vllm: vLLM's own, for jobs that
    name it.
    """

    trainer: str = "ghcr.io/sluice-dev/sluice-trainer:0.1.0"
    engine: str = "docker.io/lmsysorg/sglang:v0.5.17-cu130-runtime"
    vllm: str = "docker.io/vllm/vllm-openai:v0.32.0"
    rollout: str = "ghcr.io/sluice-dev/sluice-rollout:0.1.0"
    buffer: str = "ghcr.io/sluice-dev/sluice-buffer:0.1.0"
    rendezvous: str = "ghcr.io/sluice-dev/sluice-buffer:0.1.0"

    def of_engine(self, engine: str) -> str:
        """The image of an engine, by the word of `rollout.engine`."""
        return {"vllm": self.vllm}.get(engine, self.engine)


def uid(stored: KubeObject) -> str:
    """The identity that tells an object from a later one of the same name."""
    return str(stored["metadata"]["uid"])
