"""Pure rules for how many groups may be started, and when a job is given up.

Groups are counted, not timed: with weights v at most (v + maxStaleness + 1) x batchSize groups may
have been started that the filter keeps. A worker is admitted by the weights that its engine really
serves, so no group of a later batch is started with older weights. `staleness` has the other rules
that keep `maxStaleness` for every sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A group that came back so often by its worker's end or by an error may be what ends workers. A
# worker gets only one such group at a time, so that harmless groups are cleared and the harmful one
# is identified.
SUSPECT_FAILURES = 2
# A group that came back so often fails for good, or it would go round for ever.
MAX_FAILURES = 5


def barren_limit(batch_size: int) -> int:
    """Return the number of failed groups in a row after which the job is given up.

    It counts groups without one usable sample between them. Two batches show that it is not chance;
    the bounds are for tiny and for very large batches.
    """
    return min(max(2 * batch_size, 32), 512)


def filter_limit(batch_size: int) -> int:
    """Return the number of groups in a row that the dynamic filter may drop before the job ends.

    A weak model may have one usable group in a hundred at first, and it learns from those: that so
    many in a row are dropped then is a chance of 1 in 30,000. verl gives up after ten batches.
    """
    return max(10 * batch_size, 1024)


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Settings of the job that decide on admission."""

    batch_size: int
    samples_per_prompt: int
    max_staleness: int
    over_sampling: float
    partial: bool
    sync: bool
    total_steps: int
    # Length of the prompt stream; None if it never ends.
    stream_end: int | None

    @property
    def strict(self) -> bool:
        """True if no sample may be older than maxStaleness."""
        return self.over_sampling == 1.0 and not self.partial


def admitted(policy: AdmissionPolicy, version: int) -> int:
    """Return how many groups may have been started once `version` exists.

    Filtered and failed groups do not count.
    """
    if version < 0:
        return 0
    surplus = math.ceil(policy.over_sampling * policy.batch_size) - policy.batch_size
    allowed = (version + policy.max_staleness + 1) * policy.batch_size + surplus
    return min(allowed, policy.total_steps * policy.batch_size)


def may_start(
    policy: AdmissionPolicy, *, version: int, worker_version: int, kept: int, next_group: int
) -> int:
    """Return how many new groups a worker that serves `worker_version` may start.

    Parameters
    ----------
    policy
        Settings of the job.
    version
        Newest weight version.
    worker_version
        Weight version that the worker serves.
    kept
        Groups that were started and neither filtered nor failed.
    next_group
        First group that was never leased.

    """
    room = admitted(policy, min(version, worker_version)) - kept
    left = room if policy.stream_end is None else policy.stream_end - next_group
    return max(0, min(room, left))


def may_continue(policy: AdmissionPolicy, *, version: int, worker_version: int) -> bool:
    """True if a worker that serves `worker_version` may take a group that came back."""
    return worker_version >= version - policy.max_staleness


def total_steps(*, steps: int | None, epochs: int | None, epoch_size: int, batch_size: int) -> int:
    """Return the training steps of the job.

    Batches run over epoch boundaries; an incomplete last batch is left out.
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
