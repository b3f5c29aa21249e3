"""For each alert a fault and its end, as Prometheus' own unit tests have them: a value a minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OF_JOB = {"namespace": "team", "job": "demo"}
OF_OPERATOR = {"namespace": "sluice-system"}
_TARGET = OF_OPERATOR | {"instance": "operator:8080"}


@dataclass(frozen=True, slots=True)
class Case:
    """series: of promtool's notation, `0+1x10` and so on. quiet, firing, resolved: minutes at which
    the alert does not fire, fires, and no longer does. labels: of the alert.
    """

    alert: str
    quiet: int
    firing: int
    resolved: int
    series: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=lambda: OF_JOB)


def input_series(metric: str, values: str, **labels: str) -> dict[str, str]:
    pairs = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return {f"{metric}{{{pairs}}}": values}


def of_job(metric: str, values: str, **labels: str) -> dict[str, str]:
    return input_series(f"sluice_{metric}", values, **OF_JOB, **labels)


def engine(replica: str, seconds: int, slow: int | None = None) -> dict[str, str]:
    """A hundred tokens a minute, for which its requests take so many seconds together; half an hour
    of them `slow`, between others."""
    slow = seconds if slow is None else slow
    middle, end = 20 * seconds, 20 * seconds + 30 * slow
    course = f"0+{seconds}x20 {middle + slow}+{slow}x29 {end + seconds}+{seconds}x50"
    return of_job("rollout_request_seconds_sum", course, replica=replica) | of_job(
        "rollout_generated_tokens_total", "0+100x120", replica=replica
    )


def of_operator(*, workers: str, leads: str) -> dict[str, str]:
    """Series of one replica: its workers, and whether it leads."""
    controller = "controller_runtime_max_concurrent_reconciles"
    leader = "leader_election_master_status"
    return input_series(controller, workers, **_TARGET, controller="rljob") | input_series(
        leader, leads, **_TARGET, name="sluice"
    )


RESTARTS = input_series(
    "rljob_restarts_total", "0x10 0+1x5 5x120", namespace="team", name="demo", role="r"
)
WAITING = {"namespace": "team", "name": "demo", "condition": "Admitted", "status": "True"}
FOREIGN = input_series(
    "leader_election_master_status", "0x60", namespace="other", instance="a:1", name="b"
)
ERRORS = "controller_runtime_reconcile_errors_total"
CASES = [
    Case(
        *("SluiceNoProgress", 44, 50, 80),
        of_job("buffer_step", "0+1x10 10x60 11+1x60") | of_job("buffer_total_steps", "100x140"),
    ),
    Case(
        *("SluiceEngineBehind", 20, 28, 35),
        of_job("rendezvous_version", "0+1x60")
        | of_job("rollout_version", "0+1x60", replica="0")
        | of_job("rollout_version", "0+1x10 10x20 32+1x30", replica="1"),
        OF_JOB | {"replica": "1"},
    ),
    Case(
        *("SluiceSlowEngine", 30, 50, 80),
        engine("0", 2) | engine("1", 2) | engine("2", 2, slow=6),
        OF_JOB | {"replica": "2"},
    ),
    Case(
        *("SluiceNoEngine", 9, 30, 35),
        of_job("rendezvous_engines", "0x10 2x10 0x10 2x10")
        | of_job("rendezvous_joins_total", "_x10 2x40", member_role="rollout"),
    ),
    Case(*("SluiceRestarts", 11, 20, 100), RESTARTS, OF_JOB | {"role": "r"}),
    Case(
        *("SluiceStorageNearlyFull", 15, 25, 35),
        of_job("buffer_stored_bytes", "50x10 95x20 50x20")
        | of_job("buffer_capacity_bytes", "100x60"),
    ),
    Case(
        *("SluiceCheckpointTooOld", 150, 200, 220),
        of_job("buffer_step", "0+1x300")
        | of_job("buffer_checkpoint_step", "0+1x60 60x150 210+1x80"),
    ),
    Case(
        *("SluiceQueueTooLong", 100, 140, 155),
        input_series("rljob_status_condition", "0x150 1x30", **WAITING),
    ),
    Case(
        *("SluiceLogprobMismatch", 20, 45, 90),
        of_job("trainer_logprob_difference", "0.01x20 0.5x40 0.01x40"),
    ),
    Case(
        *("SluiceRewardCollapsed", 60, 110, 160),
        of_job("trainer_reward", "0.8x60 0.1x60 0.8x60"),
    ),
    Case(
        *("SluiceRewardsEqual", 30, 55, 65),
        of_job("trainer_equal_rewards_ratio", "0.2x20 1x40 0.2x20"),
    ),
    Case(
        *("SluiceEntropyCollapsed", 30, 58, 65),
        of_job("trainer_entropy", "0.5x20 0.0001x40 0.5x20"),
    ),
    Case(
        *("SluiceOperatorWithoutLeader", 14, 25, 35),
        of_operator(workers="8x60", leads="1x10 0x20 1x20") | FOREIGN,
        OF_OPERATOR,
    ),
    Case(
        *("SluiceOperatorWithoutLeader", 14, 30, 45),
        of_operator(workers="8x10 stale _x30 8x20", leads="1x10 stale _x30 1x20"),
        {"controller": "rljob"},
    ),
    Case(
        *("SluiceReconcileErrors", 12, 40, 70),
        input_series(ERRORS, "0x10 0+2x40 80x40", **_TARGET, controller="rljob"),
        OF_OPERATOR,
    ),
]
