"""What the operator has to tell about a job besides what the planner says of it, in the job's own status.

Events are gone after an hour; a refused change, or pods that the API server does not take, stay true for longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api import Condition, RLJob, RLJobStatus
from sluice_operator.cluster.protocol import Cluster
from sluice_operator.plan import Deletion, Event, KubeObject, Observed

_LIMIT = 2048


class Noted:
    """A cluster that adds a note to the message of the condition Running of each status that it stores."""

    def __init__(self, cluster: Cluster, note: str) -> None:
        self._cluster, self._note = cluster, note

    async def observe(self, job: RLJob) -> Observed:
        return await self._cluster.observe(job)

    async def write_status(self, job: RLJob, status: RLJobStatus) -> None:
        await self._cluster.write_status(job, with_note(status, self._note))

    async def apply(self, job: RLJob, objects: Sequence[KubeObject]) -> None:
        await self._cluster.apply(job, objects)

    async def delete(self, job: RLJob, deletions: Sequence[Deletion]) -> None:
        await self._cluster.delete(job, deletions)

    async def emit(self, job: RLJob, events: Sequence[Event]) -> None:
        await self._cluster.emit(job, events)

    async def logs_tail(self, pod: str, container: str, lines: int = 20) -> str:
        return await self._cluster.logs_tail(pod, container, lines)


def lacks(status: RLJobStatus | None, note: str) -> bool:
    """The note is not in a status that has a place for it. A pass over a world at rest writes none, so it must ask."""
    running = status.condition("Running") if status else None
    return running is not None and not running.message.endswith(_shown(note))


def with_note(status: RLJobStatus, note: str) -> RLJobStatus:
    conditions = [_noted(condition, note) for condition in status.conditions]
    return status.model_copy(update={"conditions": conditions})


def _noted(condition: Condition, note: str) -> Condition:
    if condition.type != "Running" or not note:
        return condition
    return condition.model_copy(update={"message": f"{condition.message}{_shown(note)}"})


def _shown(note: str) -> str:
    return f"; {note[:_LIMIT]}" if note else ""
