"""How many groups may be started, and when a job is given up. Pure.

Groups are counted, not timed: with weights v at most (v + maxStaleness + 1) x batchSize groups may
have been started that the filter keeps. A worker is admitted by the weights that its engine really
serves, so that nothing of a later batch is started with older weights. `staleness` has the rest of
what makes `maxStaleness` hold for every sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SUSPECT_FAILURES = 2
"""A group that came back so often by its worker's end or by an error may be what ends workers. It
is handed out alone among its like: a worker has one such group at a time, so that innocent ones are
cleared and the guilty one is known."""
MAX_FAILURES = 5
"""A group that came back so often is failed for good: it would go round for ever."""


def barren_limit(batch_size: int) -> int:
    """Failed groups in a row, without one usable sample between them,
    after which the job is given up.

    Two batches tell that it is not chance; the bounds are for tiny and for very large batches.
    """
    return min(max(2 * batch_size, 32), 512)


def filter_limit(batch_size: int) -> int:
    """Groups in a row that the dynamic filter may drop before the job is given up.

    A weak model may have one usable group in a hundred at first, and it learns from those: that so
    many in a row are dropped then is a chance of 1 in 30,000. verl gives up after ten batches.
    """
    return max(10 * batch_size, 1024)


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """The settings that decide."""

    batch_size: int
    samples_per_prompt: int
    max_staleness: int
    over_sampling: float
    partial: bool
    sync: bool
    total_steps: int
    stream_end: int | None
    """Length of the prompt stream; None: it never ends."""

    @property
    def strict(self) -> bool:
        """True where no sample may be older than maxStaleness."""
        return self.over_sampling == 1.0 and not self.partial


def admitted(policy: AdmissionPolicy, version: int) -> int:
    """How many groups, not counting filtered and failed ones, may have been started once `version`
    is there.
    """
    if version < 0:
        return 0
    surplus = math.ceil(policy.over_sampling * policy.batch_size) - policy.batch_size
    allowed = (version + policy.max_staleness + 1) * policy.batch_size + surplus
    return min(allowed, policy.total_steps * policy.batch_size)


def may_start(
    policy: AdmissionPolicy, *, version: int, worker_version: int, kept: int, next_group: int
) -> int:
    """How many new groups a worker may start that serves `worker_version`.

    kept: groups started and neither filtered nor failed.
    next_group: the first group that was never leased.
    """
    room = admitted(policy, min(version, worker_version)) - kept
    left = room if policy.stream_end is None else policy.stream_end - next_group
    return max(0, min(room, left))


def may_continue(policy: AdmissionPolicy, *, version: int, worker_version: int) -> bool:
    """True where a worker that serves `worker_version` may take a group that came back."""
    return worker_version >= version - policy.max_staleness


def total_steps(*, steps: int | None, epochs: int | None, epoch_size: int, batch_size: int) -> int:
    """Training steps of the job.

    Batches run over epoch boundaries; an incomplete last one is left out.
    """
    if steps is not None:
        return steps
    return (epochs or 0) * epoch_size // batch_size


def fair_share(free: int, *, available: int, workers: int, free_total: int) -> int:
    """Share the available groups so that all workers have equal room left once they are gone.

    A worker asks for as much as its engine has room for, which is often a whole batch: without a
    bound the first to ask would get all of a step, and the other engines none.

    Parameters
    ----------
    free
        Groups that this worker has room for.
    available
        Groups that can be leased now.
    workers
        Workers that ask now, this one included.
    free_total
        Sum of the room of all of them.

    Returns
    -------
    Groups for this worker, rounded up, so that the shares of all are never less than `available`.

    """
    left_to_all = free_total - available
    return min(free, max(0, -((left_to_all - workers * free) // workers)))
