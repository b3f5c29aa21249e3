"""Times in status are RFC 3339 text in UTC with whole seconds;
those of leases and events have microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta


def text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_text(moment: datetime) -> str:
    """Kubernetes' MicroTime."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse(value: str) -> datetime:
    return datetime.fromisoformat(value)


def parse_optional(value: str | None) -> datetime | None:
    return parse(value) if value else None


def later(now: datetime, delay: float) -> str:
    """`now` + delay; rounded up where there is a delay, so that nothing starts too early."""
    moment = now + timedelta(seconds=delay)
    if delay and moment.microsecond:
        moment += timedelta(seconds=1)
    return text(moment)


def until_next(moments: Sequence[datetime], now: datetime) -> float | None:
    """Seconds to the next moment that may change the plan.

    What is past has been acted on in this pass.
    """
    return min(((moment - now).total_seconds() for moment in moments if moment > now), default=None)
