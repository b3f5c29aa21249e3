"""Alerts. Each has a section of the same name in docs/runbooks.md.

`sluice run` warns at the same bounds (sluice/telemetry/health_*.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from observability.recording import (
    ENGINE_LAG,
    ENGINE_LATENCY,
    RESTARTS,
    REWARD,
    STATE,
    STEP,
    STORAGE,
)

RUNBOOKS = "https://github.com/sluice-dev/sluice/blob/main/docs/runbooks.md"
_JOB = "{{ $labels.namespace }}/{{ $labels.job }}"
_BY_JOB = "by (namespace, job)"
# Selects sluice's operator: other operators export metrics of the same names.
_OPERATOR = 'controller_runtime_max_concurrent_reconciles{controller="rljob"}'


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule.

    Attributes
    ----------
    name
        Name of the alert and of its section in the runbooks.
    severity
        critical, warning or info.
    wait
        How long the expression must hold.
    expr
        PromQL.
    summary
        One line.
    description
        What the alert means, and what to look at first.

    """

    name: str
    severity: str
    wait: str
    expr: str
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}#{self.name.lower()}",
            },
        }


def alerts() -> list[Alert]:
    return [*_job_alerts(), *_learning_alerts(), *_operator_alerts()]


def _job_alerts() -> list[Alert]:
    return [
        Alert(
            "SluiceNoProgress",
            "critical",
            "5m",
            f"({STEP} == {STEP} offset 30m) and {STEP} < max {_BY_JOB} (sluice_buffer_total_steps)",
            f"{_JOB} has not completed a step for 30 minutes",
            "The last committed step is {{ $value }}. Trainer and engines still hold their "
            "devices.",
        ),
        Alert(
            "SluiceEngineBehind",
            "warning",
            "10m",
            f"{ENGINE_LAG} > 2",
            f"engine {{{{ $labels.replica }}}} of {_JOB} serves old weights",
            "It is {{ $value }} versions behind: weights do not reach it, or it does not load "
            "them.",
        ),
        Alert(
            "SluiceSlowEngine",
            "warning",
            "15m",
            f"{ENGINE_LATENCY} > on (namespace, job) group_left () "
            f"(1.5 * quantile {_BY_JOB} (0.25, {ENGINE_LATENCY}))",
            f"engine {{{{ $labels.replica }}}} of {_JOB} is slower than the others",
            "It takes {{ $value | humanizeDuration }} per token, more than 1.5 times as long as "
            "the faster engines. Synchronous steps wait for it.",
        ),
        Alert(
            "SluiceNoEngine",
            "critical",
            "5m",
            f"(max {_BY_JOB} (sluice_rendezvous_engines) == 0) and "
            f'max {_BY_JOB} (sluice_rendezvous_joins_total{{member_role="rollout"}}) > 0',
            f"{_JOB} has no engine",
            "All engines have left and have not come back, so generation has stopped.",
        ),
        Alert(
            "SluiceRestarts",
            "warning",
            "0m",
            f"{RESTARTS} > 3",
            f"{{{{ $labels.role }}}} of {_JOB} restarts repeatedly",
            "{{ $value | humanize }} restarts within an hour. status.lastFailure of the job has "
            "the last log lines of the failed pod.",
        ),
        Alert(
            "SluiceStorageNearlyFull",
            "warning",
            "10m",
            f"{STORAGE} > 0.9",
            f"the buffer of {_JOB} is nearly full",
            "{{ $value | humanizePercentage }} of its storage is used. Checkpoints are made "
            "earlier to free space.",
        ),
        Alert(
            "SluiceCheckpointTooOld",
            "warning",
            "5m",
            f"({STEP} > {STEP} offset 2h) and max {_BY_JOB} (sluice_buffer_checkpoint_step)"
            f" == max {_BY_JOB} (sluice_buffer_checkpoint_step offset 2h)",
            f"{_JOB} has written no checkpoint for two hours",
            "The job is at step {{ $value }}. If the trainer fails, all steps since the last "
            "checkpoint are repeated.",
        ),
        Alert(
            "SluiceQueueTooLong",
            "info",
            "2h",
            f"{STATE} == 2",
            f"{_JOB} waits in its queue",
            "It has waited for admission for two hours. The message of its condition Admitted "
            "comes from the queue.",
        ),
    ]


def _learning_alerts() -> list[Alert]:
    difference = "avg_over_time(sluice_trainer_logprob_difference[15m])"
    best = f"max_over_time({REWARD}[6h])"
    return [
        Alert(
            "SluiceLogprobMismatch",
            "warning",
            "5m",
            f"max {_BY_JOB} ({difference}) > 0.1",
            f"trainer and engines of {_JOB} disagree about log-probs",
            "The log-prob of a token differs by {{ $value | humanize }} on average.",
        ),
        Alert(
            "SluiceRewardCollapsed",
            "warning",
            "10m",
            f"({REWARD} < 0.5 * {best}) and {best} > 0",
            f"the reward of {_JOB} has collapsed",
            "The mean is {{ $value | humanize }}, less than half of the best in the last 6 hours.",
        ),
        Alert(
            "SluiceRewardsEqual",
            "warning",
            "5m",
            f"min {_BY_JOB} (min_over_time(sluice_trainer_equal_rewards_ratio[15m])) > 0.95",
            f"the rewards of {_JOB} are all equal",
            "All samples of a prompt have the same reward in {{ $value | humanizePercentage }} of "
            "the prompts, so the policy cannot learn from them.",
        ),
        Alert(
            "SluiceEntropyCollapsed",
            "warning",
            "5m",
            f"max {_BY_JOB} (max_over_time(sluice_trainer_entropy[15m])) < 0.001",
            f"the entropy of {_JOB} has collapsed",
            "It is {{ $value | humanize }} nats per token: the policy hardly explores any more.",
        ),
    ]


def _operator_alerts() -> list[Alert]:
    gone = f"(absent({_OPERATOR}) and on () count(present_over_time({_OPERATOR}[1d])))"
    leading = f"leader_election_master_status and on (instance) {_OPERATOR}"
    return [
        Alert(
            "SluiceOperatorWithoutLeader",
            "critical",
            "5m",
            f"(max by (namespace) ({leading}) == 0) or {gone}",
            "the operator has no leader",
            "Running jobs continue, but no job is started, restarted or ended.",
        ),
        Alert(
            "SluiceReconcileErrors",
            "warning",
            "10m",
            "sum by (namespace)"
            ' (rate(controller_runtime_reconcile_errors_total{controller="rljob"}[10m])) > 0.01',
            "the operator fails repeatedly",
            "{{ $value | humanize }} reconcile passes fail per second. The log of the operator "
            "names the jobs.",
        ),
    ]
