"""Pure rules for the step by which a group must be trained, so that `maxStaleness` holds.

Step s trains weights s - 1, so a group whose oldest token comes from weights v is due by step
v + maxStaleness + 1. A step takes exactly batchSize groups. All groups that are in work or finished
can therefore be trained in time if and only if, for each step d from the next one (s) on,

    groups due by d  <=  (d - s + 1) x batchSize

and taking those that are due first keeps it so (earliest deadline first; Jackson 1955). Three
decisions keep the inequality true, whatever order groups finish in:

* a group is handed out only if there is room for it among those due by then (`places_left`; for new
  groups `admission.may_start` counts the same);
* a batch is fixed only if the inequality still holds without it (`stragglers`), and takes what is
  due first (`earliest`);
* a finished group is generated again if its weights are older than those it was leased for, and
  there is no room for it.

A worker with the newest weights always finds room, so waiting for groups in work never blocks the
job: they finish, or come back and go to such a worker.

With `overSampling` or `partial` the user decides for the opposite, to take what finishes first: a
batch does not wait for stragglers, and groups older than the bound are trained all the same and
counted (`stale_groups`). Mode sync without `partial` promises samples of the newest weights alone,
so a surplus group is generated again (`outdated`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import NamedTuple

from sluice_buffer.rules.admission import AdmissionPolicy

_UNBOUNDED = 1 << 62


class Stragglers(NamedTuple):
    """Groups that a batch waits for: `number` of those in work that are due by step `due`."""

    due: int
    number: int


def due(policy: AdmissionPolicy, version: int) -> int:
    """Return the last step that may train a group whose oldest weights are `version`."""
    return version + policy.max_staleness + 1


def places_left(
    policy: AdmissionPolicy, *, step: int, version: int, outstanding: Mapping[int, int]
) -> int:
    """Return how many more groups may be generated with `version` and be trained in time.

    Parameters
    ----------
    policy
        Settings of the job.
    step
        Next batch that is not fixed.
    version
        Weights that the groups would be generated with.
    outstanding
        Number of groups in work or finished, by the version of their oldest weights.

    """
    first = due(policy, version)
    if version < 0 or first < step:
        return 0
    places, total = _UNBOUNDED, 0
    for oldest in sorted({version, *outstanding}):
        total += outstanding.get(oldest, 0)
        last = due(policy, oldest)
        if last >= first:
            places = min(places, (last - step + 1) * policy.batch_size - total)
    return max(0, places)


def stragglers(
    policy: AdmissionPolicy, *, step: int, in_work: Mapping[int, int], finished: Mapping[int, int]
) -> Stragglers | None:
    """Return groups in work that must finish before batch `step` is fixed; None if it can be.

    Without them the batch would take younger groups, and the groups that are left would not all fit
    into the steps until they are due.

    Parameters
    ----------
    policy
        Settings of the job.
    step
        Next batch that is not fixed.
    in_work, finished
        Number of groups, by the version of their oldest weights.

    """
    working = done = 0
    for oldest in sorted({*in_work, *finished}):
        working += in_work.get(oldest, 0)
        done += finished.get(oldest, 0)
        if done >= policy.batch_size:
            return None  # the whole batch is due by then: it takes no younger group
        last = max(due(policy, oldest), step)
        surplus = working - (last - step) * policy.batch_size
        if surplus > 0:
            return Stragglers(last, surplus)
    return None


def earliest(finished: Mapping[int, Collection[int]], count: int) -> list[int]:
    """Return the `count` groups that are due first, ordered by id.

    Among equals the lowest ids are taken. `finished` has ids of finished groups by the version of
    their oldest weights.
    """
    chosen: list[int] = []
    for oldest in sorted(finished):
        chosen += heapq.nsmallest(count - len(chosen), finished[oldest])
    return sorted(chosen)


def outdated(policy: AdmissionPolicy, *, version: int, start_version: int) -> bool:
    """True if a group must be generated again now that `version` exists."""
    return policy.sync and not policy.partial and start_version < version - policy.max_staleness


def stale(policy: AdmissionPolicy, *, step: int, min_version: int) -> bool:
    """True if a group of batch `step` is older than the bound."""
    return step > due(policy, min_version)
