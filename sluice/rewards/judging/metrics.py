"""Counters of the judge, as its process shows them to Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from sluice.rewards.types import Judgement, RewardError

REWARDS = Counter(
    "sluice_rollout_rewards",
    "Samples judged. outcome: ok, or why there is no reward: raised, timeout, died, refused, "
    "invalid, unavailable.",
    ["outcome"],
)
SECONDS = Histogram(
    "sluice_rollout_reward_seconds",
    "Time from a finished response to its reward, waiting included.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
SANDBOX = Gauge(
    "sluice_rollout_sandbox", "1: what isolates tested programs in this pod.", ["isolation"]
)


_OK = REWARDS.labels(outcome="ok")


def counted(outcomes: list[Judgement | RewardError]) -> list[Judgement | RewardError]:
    """The same outcomes, counted."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    _OK.inc(len(outcomes) - len(failed))
    for error in failed:
        REWARDS.labels(outcome=error.reason).inc()
    return outcomes
