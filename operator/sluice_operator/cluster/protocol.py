"""The cluster protocol of the reconciler, which Kubernetes and a laptop implement alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sluice.api import RLJob, RLJobStatus
from sluice_operator.plan.facts.model import Deletion, Event, KubeObject, Observed


class Cluster(Protocol):
    """A place to run pods.

    Reads see this process's own writes. Otherwise an observation that lags behind the last creation
    would make the planner believe that pods have vanished.
    """

    async def observe(self, job: RLJob) -> Observed:
        """Return the job's pods, its other objects and its stored status, without `progress`."""
        ...

    async def write_status(self, job: RLJob, status: RLJobStatus) -> None:
        """Store the status. Once this returns, it survives a crash of this process."""
        ...

    async def apply(self, job: RLJob, objects: Sequence[KubeObject]) -> None:
        """Create objects, or update them to this state. A pod that exists stays unchanged."""
        ...

    async def delete(self, job: RLJob, deletions: Sequence[Deletion]) -> None:
        """Start to delete objects. Objects that are gone already are no error.

        A pod is gone only once a later observation lacks it.
        """
        ...

    async def emit(self, job: RLJob, events: Sequence[Event]) -> None:
        """Publish events of the job."""
        ...


class InProcessCluster(Cluster, Protocol):
    """A cluster inside this process, which can wake its reconciler."""

    async def changed(self, timeout: float) -> bool:
        """Wait until a pod has changed since the last call.

        Return False after `timeout` seconds without a change.
        """
        ...

    def kill(self) -> None:
        """Kill every process now, as on the second Ctrl-C."""
        ...
