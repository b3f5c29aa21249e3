"""Spans of a prompt group's life as the buffer sees it.

    prompt group     from its first lease until it is trained, filtered or failed
      wait for batch from its last sample until a batch has it
      in training    from there until the step is committed, linked to the trainer's step

Times from before a restart of the buffer are lost: such a group begins with the restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.telemetry import tracing
from sluice_buffer.core import Buffer
from sluice_buffer.group import TRAINING, Group, GroupKey, GroupState, group_name

Attributes = Mapping[str, str | int]
_NONE: Attributes = {}
_ENDS = {GroupState.FILTERED: "filtered", GroupState.FAILED: "failed"}


@dataclass(slots=True)
class _Times:
    """Seconds of tracing.now; 0 for events that have not happened."""

    began: float
    finished: float = 0.0
    batched: float = 0.0


class GroupTraces:
    """Follows the groups of a buffer from state to state. It exists only if tracing is enabled."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._times: dict[GroupKey, _Times] = {}
        buffer.watch(self._changed)

    def _changed(self, key: GroupKey, group: Group) -> None:
        now, trained = tracing.now(), group.step and group.step <= self._buffer.memory.progress.step
        if trained and group.state in (GroupState.BATCHED, GroupState.TRAINED):
            return  # recorded when its step was committed
        times = self._times.setdefault(key, _Times(now))
        if group.state is GroupState.FINISHED and key.round != TRAINING:
            self._end(key, "evaluated")
        elif group.state is GroupState.FINISHED:
            times.finished = times.finished or now
        elif group.state is GroupState.BATCHED and not times.batched:
            times.batched = now
            self._tell("wait for batch", key, times.finished or times.began, {"step": group.step})
        elif group.state in _ENDS:
            self._end(key, _ENDS[group.state], {"note": group.note})

    def committed(self, step: int) -> None:
        """End the spans of a step's groups. Called inside the commit."""
        links = tracing.links_to_current()
        for group_id in self._buffer.memory.batches.get(step, ()):
            key = GroupKey(TRAINING, group_id)
            if times := self._times.get(key):  # missing if the commit is repeated
                began = times.batched or times.began
                self._tell("in training", key, began, {"step": step}, links=links)
                self._end(key, "trained", {"step": step})

    def _end(self, key: GroupKey, outcome: str, attributes: Attributes = _NONE) -> None:
        began, attributes = self._times.pop(key).began, {"outcome": outcome, **attributes}
        self._tell("prompt group", key, began, attributes, root=True)

    def _tell(
        self,
        name: str,
        key: GroupKey,
        began: float,
        attributes: Attributes,
        *,
        root: bool = False,
        links: Sequence[Any] = (),
    ) -> None:
        """Record a span that ends now."""
        round_ = self._buffer.memory.rounds.get(key.round)
        tracing.record(
            name,
            began,
            tracing.now(),
            group=group_name(key, round_.serial if round_ else 0),
            root=root,
            links=links,
            attributes={"group": key.group_id, **attributes},
        )
