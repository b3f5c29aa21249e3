"""The goodput in a job's status, which goes on across restarts of rendezvous and operator."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.api import GoodputStatus, RLJob, RLJobStatus
from sluice.telemetry.goodput import DeviceSeconds, Goodput
from sluice_operator.plan.facts.model import Progress

# Growth of the device time that is written without a new step. A status is not written for every
# second that passes.
_NOTABLE_GROWTH = 1.05


def with_goodput(job: RLJob, status: RLJobStatus, progress: Progress | None) -> RLJobStatus:
    """Return the status with the device time so far, if a step was made or much time has passed.

    Parameters
    ----------
    job
        The job.
    status
        Its status before `progress`.
    progress
        The latest answer of buffer and rendezvous.

    """
    if progress is None or not progress.device_seconds:
        return status
    before = status.goodput or GoodputStatus(ratio="0")
    clock = DeviceSeconds.recalled(before.states, before.earlier)
    clock.add(progress.device_seconds)
    total = clock.total()
    has_grown = sum(total.values()) > _NOTABLE_GROWTH * sum(before.states.values())
    if progress.step == status.step and not has_grown:
        return status
    goodput = Goodput.from_counters(
        total, progress.counters, progress.step, colocated=job.spec.trainer.colocate
    )
    written = GoodputStatus(
        ratio=f"{goodput.ratio:.2f}",
        seconds=_whole(goodput.seconds),
        states=_whole(total),
        earlier=_whole(clock.earlier),
    )
    return status.model_copy(update={"goodput": written})


def _whole(seconds: Mapping[str, float]) -> dict[str, int]:
    # Rounded down, so that the next answer of the same process is never less than what is written.
    return {key: int(value) for key, value in seconds.items() if int(value)}
