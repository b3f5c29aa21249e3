"""Times as text: RFC 3339 in UTC.

Times in a status have whole seconds, those of leases and events have microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta


def text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_text(moment: datetime) -> str:
    """Return the time as Kubernetes' MicroTime."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse(value: str) -> datetime:
    return datetime.fromisoformat(value)


def parse_optional(value: str | None) -> datetime | None:
    return parse(value) if value else None


def later(now: datetime, delay: float) -> str:
    """Return `now` plus a delay in seconds, rounded up so that an attempt never starts too early.

    Without a delay it is rounded down, so that the attempt starts now.
    """
    moment = now + timedelta(seconds=delay)
    if delay and moment.microsecond:
        moment += timedelta(seconds=1)
    return text(moment)


def until_next(moments: Sequence[datetime], now: datetime) -> float | None:
    """Return the seconds until the next of these times; None if all are past.

    The present pass has acted on past times.
    """
    return min(((moment - now).total_seconds() for moment in moments if moment > now), default=None)
