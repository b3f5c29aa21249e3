"""The goodput of a job in its status, counted on over restarts of rendezvous and operator."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.api import GoodputStatus, RLJob, RLJobStatus
from sluice.telemetry.goodput import DeviceSeconds, Goodput
from sluice_operator.plan.facts.model import Progress

_WORTH_TELLING = 1.05
"""Growth of the device time after which it is told without a new step: a status is not written
for each second that passes."""


def with_goodput(job: RLJob, status: RLJobStatus, progress: Progress | None) -> RLJobStatus:
    """The status with the device time until now, where a step was made or much time has passed.

    status: as it was before this progress.
    """
    if progress is None or not progress.device_seconds:
        return status
    before = status.goodput or GoodputStatus(ratio="0")
    clock = DeviceSeconds.recalled(before.states, before.earlier)
    clock.add(progress.device_seconds)
    total = clock.total()
    much = sum(total.values()) > _WORTH_TELLING * sum(before.states.values())
    if progress.step == status.step and not much:
        return status
    goodput = Goodput.of(
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
    """Rounded down: the next answer of the same process is never less than what is written."""
    return {key: int(value) for key, value in seconds.items() if int(value)}
