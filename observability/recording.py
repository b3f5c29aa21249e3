"""Recording rules, shared by panels and alerts.

Names follow Prometheus's convention `level:metric:operation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CONDITION = "namespace_job_condition:sluice_job:true"
STATE = "namespace_job:sluice_job:state"
RESTARTS = "namespace_job_role:sluice_restarts:increase1h"
DEVICES = "namespace_job_state:sluice_devices:mean10m"
CATEGORIES = "namespace_job_category:sluice_devices:mean10m"
GOODPUT = "namespace_job:sluice_goodput:ratio10m"
REDONE = "namespace_job:sluice_steps_redone:ratio"
WASTED = "namespace_job:sluice_groups_wasted:ratio"
STEP = "namespace_job:sluice_step:max"
PROGRESS = "namespace_job:sluice_progress:ratio"
REWARD = "namespace_job:sluice_reward:mean15m"
PLANNED = "namespace_job_role:sluice_plan_devices:max"
SPEEDUP = "namespace_job:sluice_plan_speedup:max"
STORAGE = "namespace_job:sluice_storage_used:ratio"
ENGINE_LAG = "namespace_job_replica:sluice_engine_lag:versions"
ENGINE_LATENCY = "namespace_job_replica:sluice_engine_latency:seconds10m"
# Word and colour by value of STATE.
STATES = {
    0: ("pending", "text"),
    1: ("running", "green"),
    2: ("queued", "blue"),
    3: ("succeeded", "dark-green"),
    4: ("failed", "red"),
    5: ("suspended", "purple"),
}
_BY_JOB = "by (namespace, job)"
_BY_ENGINE = "by (namespace, job, replica)"
# The operator's series label a job `name`, all other series `job`.
_RENAMED = '"job", "$1", "name", "(.+)"'


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording rule. `labels` are added to its series."""

    name: str
    expr: str
    labels: dict[str, str] = field(default_factory=dict)

    def rule(self) -> dict[str, Any]:
        rule: dict[str, Any] = {"record": self.name, "expr": self.expr}
        return rule | ({"labels": self.labels} if self.labels else {})


def recordings() -> list[Recording]:
    """Return all rules; each uses only earlier ones."""
    return [*_states(), *_progress(), *_waste(), *_devices()]


def _states() -> Iterator[Recording]:
    holds = f'label_replace(rljob_status_condition{{status="True"}}, {_RENAMED})'
    yield Recording(CONDITION, f"max by (namespace, job, condition) ({holds})")
    yield Recording(STATE, " or ".join(_states_by_rank()))
    restarts = f"label_replace(increase(rljob_restarts_total[1h]), {_RENAMED})"
    yield Recording(RESTARTS, f"sum by (namespace, job, role) ({restarts})")
    speedup = f"label_replace(rljob_plan_speedup, {_RENAMED})"
    yield Recording(SPEEDUP, f"max {_BY_JOB} ({speedup})")
    planned = f"label_replace(rljob_plan_devices, {_RENAMED})"
    yield Recording(PLANNED, f"max by (namespace, job, role) ({planned})")


def _states_by_rank() -> Iterator[str]:
    """Yield expressions whose first match is the job's state."""
    rank = [("Failed", 1, 4), ("Succeeded", 1, 3), ("Suspended", 1, 5), ("Running", 1, 1)]
    for condition, holds, code in [*rank, ("Admitted", 0, 2)]:
        series = f'{CONDITION}{{condition="{condition}"}}'
        yield f"(0 * max {_BY_JOB} ({series} == {holds}) + {code})"
    yield f"0 * max {_BY_JOB} ({CONDITION})"


def _progress() -> Iterator[Recording]:
    """Yield rules on progress.

    The buffer knows the committed step even while the trainer is down.
    """
    yield Recording(STEP, f"max {_BY_JOB} (sluice_buffer_step)")
    yield Recording(PROGRESS, f"{STEP} / max {_BY_JOB} (sluice_buffer_total_steps > 0)")
    yield Recording(REWARD, f"max {_BY_JOB} (avg_over_time(sluice_trainer_reward[15m]))")
    room = f"max {_BY_JOB} (sluice_buffer_capacity_bytes > 0)"
    yield Recording(STORAGE, f"max {_BY_JOB} (sluice_buffer_stored_bytes) / {room}")
    newest = f"max {_BY_JOB} (sluice_rendezvous_version)"
    served = f"min {_BY_ENGINE} (sluice_rollout_version)"
    lag = f"{newest} - on (namespace, job) group_right () {served}"
    yield Recording(ENGINE_LAG, f"clamp_min({lag}, 0)")
    seconds = f"sum {_BY_ENGINE} (rate(sluice_rollout_request_seconds_sum[10m]))"
    tokens = f"sum {_BY_ENGINE} (rate(sluice_rollout_generated_tokens_total[10m]))"
    yield Recording(ENGINE_LATENCY, f"{seconds} / ({tokens} > 0)")


def _waste() -> Iterator[Recording]:
    redone = f"max {_BY_JOB} (sluice_buffer_steps_redone_total)"
    yield Recording(REDONE, f"{redone} / clamp_min({STEP} + {redone}, 1)")
    metrics = [f"sluice_buffer_groups_{kind}_total" for kind in ("filtered", "failed", "outdated")]
    wasted = "(" + " + ".join(f"sum {_BY_JOB} ({metric})" for metric in metrics) + ")"
    trained = f"sum {_BY_JOB} (sluice_buffer_groups_trained_total)"
    yield Recording(WASTED, f"{wasted} / clamp_min({wasted} + {trained}, 1)")


def _devices() -> Iterator[Recording]:
    """Yield rules on devices by category, as in sluice/telemetry/goodput.py.

    The sum over categories is the number of devices that the job holds.
    """
    rate = "rate(sluice_rendezvous_device_seconds_total[10m])"
    yield Recording(DEVICES, f"sum by (namespace, job, member_role, state) ({rate})")
    for category, expr in _by_category().items():
        yield Recording(CATEGORIES, expr, {"category": category})
    useful = f'sum {_BY_JOB} ({CATEGORIES}{{category=~"trained|generated"}})'
    yield Recording(GOODPUT, f"{useful} / (sum {_BY_JOB} ({CATEGORIES}) > 0)")


def _by_category() -> dict[str, str]:
    """Return PromQL by category.

    Engines that share the trainer's GPUs report no devices; the trainer's waiting is their
    generating.
    """
    trained = _busy('member_role="trainer",state="training"')
    awaited = _busy('member_role="trainer",state=~"waiting|evaluating"')
    apart = f'count {_BY_JOB} ({DEVICES}{{member_role="rollout"}})'
    at_engines = _busy('member_role="rollout",state=~"generating|tail"')
    generated = f"({at_engines} or ({awaited} unless {apart}))"
    idle = _busy('member_role="rollout",state=~"idle|unresponsive|draining"')
    return {
        "trained": f"{trained} * on (namespace, job) (1 - {REDONE})",
        "generated": f"{generated} * on (namespace, job) (1 - {WASTED})",
        "thrown_away": _sum(
            f"{trained} * on (namespace, job) {REDONE}",
            f"{generated} * on (namespace, job) {WASTED}",
        ),
        "waited": _sum(f"({awaited} and {apart})", idle),
        "synchronised": _busy('state=~"publishing|taking_turn|synchronising"'),
        "saved": _busy('state=~"saving|exporting"'),
        "started": _busy('state="starting"'),
        "restarted": _busy('state="restarting"'),
    }


def _busy(selector: str) -> str:
    return f"sum {_BY_JOB} ({DEVICES}{{{selector}}})"


def _sum(*parts: str) -> str:
    """Return the sum of the parts that a job has."""
    every = f"0 * sum {_BY_JOB} ({DEVICES})"
    return " + ".join(f"(({part}) or {every})" for part in parts)
