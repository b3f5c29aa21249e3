"""When a gang gets another attempt, after which delay, and when the job gives up."""

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
    """Start another attempt after `delay` seconds.

    restarts: the gang's restart count afterwards. failure: None for a disruption, which does not
    count against the budget.
    """

    delay: float
    restarts: int
    failure: LastFailure | None = None
    disruption: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail the job."""

    reason: str
    message: str
    failure: LastFailure


def restart(
    gang: Gang, facts: GangFacts, status: GangStatus, policy: FailurePolicy, now: datetime
) -> Restart | GiveUp | None:
    """Decide whether a gang gets another attempt.

    - A configuration error (exit code 2) fails the job at once, whatever else happened.
    - A disruption that the cluster caused (preemption, eviction, a pod that another client deleted)
      never counts against the budget, even if other pods of the gang failed because of it.
    - Rollout, buffer and rendezvous restart without bound, after ``min(base * 2**n, max)`` seconds.
      What they hold is durable or can be rebuilt, and the status shows a crash loop. n starts from
      0 again once the gang was stable, so only failures in a row make an engine wait longer. An
      engine was stable if it was ready for twice as long as its last delay; a disruption ends the
      row as well.
    - A trainer gang fails the job once ``maxRestarts`` is used up. Its count never falls.

    Returns
    -------
    The decision, or None if nothing is wrong with the gang.

    """
    if facts.config_error:
        message = INVALID_CONFIGURATION.text(
            pod=facts.config_error.pod, headline=headline(facts.config_error)
        )
        return GiveUp(INVALID_CONFIGURATION.name, message, facts.config_error)
    if facts.disruption:
        kept = 0 if gang.role == "rollout" else status.restarts
        return Restart(DISRUPTION_DELAY, kept, disruption=facts.disruption)
    if facts.failure is None:
        return None
    if gang.role == "trainer" and status.restarts >= policy.max_restarts:
        message = MAX_RESTARTS.text(restarts=status.restarts, headline=headline(facts.failure))
        return GiveUp(MAX_RESTARTS.name, message, facts.failure)
    base, limit = backoff(gang, policy)
    stable = _was_stable(gang, facts, limit, now) or _has_worked(gang, status, policy, now)
    before = 0 if stable else status.restarts
    return Restart(delay(base, limit, before), before + 1, facts.failure)


def backoff(gang: Gang, policy: FailurePolicy) -> tuple[int, int]:
    """Return (base, maximum) of the gang's restart delay in seconds."""
    if gang.role == "rollout":
        return policy.rollout_backoff_seconds, policy.longest_rollout_backoff
    return SERVICE_BACKOFF


def delay(base: int, limit: int, failures: int) -> float:
    """Return ``min(base * 2**failures, limit)`` seconds."""
    # The exponent is bounded: after a year of failures the power would no longer fit a float.
    return float(min(base * 2 ** min(failures, 32), limit))


def is_due(retry: datetime, gang: Gang, policy: FailurePolicy, now: datetime) -> bool:
    """Return True once the next attempt may start.

    A retry time further ahead than any delay was written before the clock was set back, or by a
    machine whose clock is fast. Such an attempt starts now instead of an hour later.
    """
    # The retry time is rounded up to a whole second.
    longest = max(backoff(gang, policy)[1], DISRUPTION_DELAY) + 1
    return not now < retry <= now + timedelta(seconds=longest)


def _was_stable(gang: Gang, facts: GangFacts, limit: int, now: datetime) -> bool:
    if gang.role == "trainer" or facts.started is None:
        return False
    return (now - facts.started).total_seconds() >= STABLE_AFTER_BACKOFFS * limit


def _has_worked(gang: Gang, status: GangStatus, policy: FailurePolicy, now: datetime) -> bool:
    """Return True if an engine was ready for so long that its failures no longer are in a row."""
    ready = clock.parse_optional(status.ready_time)
    if gang.role != "rollout" or ready is None:
        return False
    last_delay = delay(*backoff(gang, policy), max(status.restarts - 1, 0))
    return (now - ready).total_seconds() >= STABLE_AFTER_BACKOFFS * last_delay
