"""A cluster, as the reconciler needs it. Kubernetes and a laptop answer the same questions with the
same objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sluice.api import RLJob, RLJobStatus
from sluice_operator.plan.facts.model import Deletion, Event, KubeObject, Observed


class Cluster(Protocol):
    """Where pods run.

    Reads see this process's own writes: an observation that lags behind our last creation would
    make the planner believe that pods have vanished.
    """

    async def observe(self, job: RLJob) -> Observed:
        """The job's pods, its other objects and its stored status.

        `progress` is left to the caller.
        """
        ...

    async def write_status(self, job: RLJob, status: RLJobStatus) -> None:
        """Store the status. When this returns it survives a crash of this process."""
        ...

    async def apply(self, job: RLJob, objects: Sequence[KubeObject]) -> None:
        """Create objects, or bring them to this state. A pod that exists already is
        left as it is.
        """
        ...

    async def delete(self, job: RLJob, deletions: Sequence[Deletion]) -> None:
        """Begin to delete. Pods are gone only when a later observation lacks them; what is gone
        already is no error.
        """
        ...

    async def emit(self, job: RLJob, events: Sequence[Event]) -> None:
        """Tell people what happened."""
        ...


class InProcessCluster(Cluster, Protocol):
    """A cluster inside this process, which wakes its reconciler itself."""

    async def changed(self, timeout: float) -> bool:
        """Wait until a pod has changed since the last call; False: the time is up."""
        ...

    def kill(self) -> None:
        """Kill every process now. For the second Ctrl-C."""
        ...
