"""When a gang gets another attempt, after how long, and when the job gives up."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sluice.api import GangStatus, LastFailure
from sluice.api.groups.lifecycle import FailurePolicy
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.constants import (
    DISRUPTION_DELAY,
    INVALID_CONFIGURATION,
    MAX_RESTARTS,
    SERVICE_BACKOFF,
    STABLE_AFTER_BACKOFFS,
)
from sluice_operator.plan.facts.model import Gang, GangFacts
from sluice_operator.plan.facts.podstate import headline


@dataclass(frozen=True, slots=True)
class Restart:
    """Another attempt. restarts: the gang's count after it; failure: None for a disruption, which
    counts nothing.
    """

    delay: float
    restarts: int
    failure: LastFailure | None = None
    disruption: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job fails."""

    reason: str
    message: str
    failure: LastFailure


def restart(
    gang: Gang, facts: GangFacts, status: GangStatus, policy: FailurePolicy, now: datetime
) -> Restart | GiveUp | None:
    """Decide whether a gang that lost a pod gets another attempt; None: nothing is wrong.

    A configuration error (exit code 2) fails the job at once, whatever else happened. Disruptions
    that the cluster caused (preemption, eviction, a pod that others deleted) never use up the
    budget, even where the gang's other pods died of it. Rollout, buffer and rendezvous restart
    without bound, after ``min(base * 2**n, max)`` seconds: what they hold is durable or soft, and a
    crash loop shows in status; n starts again from 0 once a gang was stable. So an engine waits
    longer only for failures in a row, not for those of other days and causes: it was stable if it
    was ready for twice as long as its last pause, and a disruption ends the row. A trainer gang
    fails the job once ``maxRestarts`` is used up, and its count never falls.
    """
    if facts.config_error:
        return GiveUp(
            INVALID_CONFIGURATION.name,
            INVALID_CONFIGURATION.text(
                pod=facts.config_error.pod, headline=headline(facts.config_error)
            ),
            facts.config_error,
        )
    if facts.disruption:
        kept = 0 if gang.role == "rollout" else status.restarts
        return Restart(DISRUPTION_DELAY, kept, disruption=facts.disruption)
    if facts.failure is None:
        return None
    if gang.role == "trainer" and status.restarts >= policy.max_restarts:
        text = MAX_RESTARTS.text(restarts=status.restarts, headline=headline(facts.failure))
        return GiveUp(MAX_RESTARTS.name, text, facts.failure)
    base, limit = backoff(gang, policy)
    stable = _was_stable(gang, facts, limit, now) or _has_worked(gang, status, policy, now)
    before = 0 if stable else status.restarts
    return Restart(delay(base, limit, before), before + 1, facts.failure)


def backoff(gang: Gang, policy: FailurePolicy) -> tuple[int, int]:
    """(base, maximum) seconds."""
    if gang.role == "rollout":
        return policy.rollout_backoff.base_seconds, policy.rollout_backoff.max_seconds
    return SERVICE_BACKOFF


def delay(base: int, limit: int, failures: int) -> float:
    """min(base * 2**failures, limit); the exponent is bounded so that a year of failures is
    still a number.
    """
    return float(min(base * 2 ** min(failures, 32), limit))


def is_due(retry: datetime, gang: Gang, policy: FailurePolicy, now: datetime) -> bool:
    """True once the time of the next attempt has come.

    A time that is further ahead than any delay was written before the clock was set back, or by a
    machine whose clock is ahead: the attempt starts now, and not an hour later.
    """
    longest = (
        max(backoff(gang, policy)[1], DISRUPTION_DELAY) + 1
    )  # second, to which the time was rounded up
    return not now < retry <= now + timedelta(seconds=longest)


def _was_stable(gang: Gang, facts: GangFacts, limit: int, now: datetime) -> bool:
    if gang.role == "trainer" or facts.started is None:
        return False
    return (now - facts.started).total_seconds() >= STABLE_AFTER_BACKOFFS * limit


def _has_worked(gang: Gang, status: GangStatus, policy: FailurePolicy, now: datetime) -> bool:
    """True if an engine was ready for long enough that its next failure is another one."""
    ready = clock.parse_optional(status.ready_time)
    if gang.role != "rollout" or ready is None:
        return False
    last_pause = delay(*backoff(gang, policy), max(status.restarts - 1, 0))
    return (now - ready).total_seconds() >= STABLE_AFTER_BACKOFFS * last_pause
