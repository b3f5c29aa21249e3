"""Index of training groups that have a step to be trained by, by their oldest weights.

Every question of `rules/staleness` is answered from counts, so neither a worker that asks nor a
trainer that waits causes a look at each group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from sluice_buffer.group import Group, GroupState

# Ids of groups, by the version of their oldest weights. No set is empty.
Versions = Mapping[int, set[int]]


class Schedule:
    """Groups that are leased, that came back with a partial response, or that are finished.

    A group that waits without a partial response has no weights yet, so it has no step to be
    trained by.
    """

    def __init__(self) -> None:
        self._ids: dict[GroupState, dict[int, set[int]]] = defaultdict(dict)
        self._places: dict[int, tuple[GroupState, int]] = {}

    def put(self, group_id: int, group: Group) -> None:
        """Note the group's present state and version."""
        if (place := self._places.pop(group_id, None)) is not None:
            state, version = place
            ids = self._ids[state][version]
            ids.remove(group_id)
            if not ids:
                del self._ids[state][version]
        if group.state <= GroupState.FINISHED and not fresh(group):
            self._places[group_id] = group.state, group.version
            self._ids[group.state].setdefault(group.version, set()).add(group_id)

    def __getitem__(self, state: GroupState) -> Versions:
        return self._ids[state]

    def counts(self, *states: GroupState) -> Counter[int]:
        """Count groups in these states, by the version of their oldest weights."""
        total: Counter[int] = Counter()
        for state in states:
            for version, ids in self._ids[state].items():
                total[version] += len(ids)
        return total

    def outstanding(self, without: int | None = None) -> Counter[int]:
        """Count groups that are in no batch yet, by version, without the group `without`."""
        total = self.counts(GroupState.LEASED, GroupState.WAITING, GroupState.FINISHED)
        if without in self._places:
            total[self._places[without][1]] -= 1
        return total


def fresh(group: Group) -> bool:
    """True if the group waits for a worker and has no token yet."""
    return group.state is GroupState.WAITING and not group.size


def ids_of(versions: Iterable[set[int]]) -> list[int]:
    """Return all ids of several sets, in order."""
    return sorted(group_id for ids in versions for group_id in ids)
