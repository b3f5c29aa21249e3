"""A finished job is deleted after spec.ttlSecondsAfterFinished."""

from __future__ import annotations

from datetime import datetime, timedelta

from sluice.api import RLJobSpec, RLJobStatus
from sluice_operator.plan.facts import clock


def expiry(spec: RLJobSpec, status: RLJobStatus) -> datetime | None:
    """When the finished job is to be deleted; None: never."""
    if spec.ttl_seconds_after_finished is None or status.completion_time is None:
        return None
    return clock.parse(status.completion_time) + timedelta(seconds=spec.ttl_seconds_after_finished)
