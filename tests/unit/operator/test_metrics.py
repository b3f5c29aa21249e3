"""A job's series: there once they are known, and gone with the job."""

from __future__ import annotations

from sluice.api import RLJobStatus
from sluice.telemetry.planner import Advice, Split
from sluice_operator.metrics import OperatorMetrics
from sluice_operator.plan.facts.model import JobKey

KEY: JobKey = ("default", "demo")
INFO = ("1234", "sglang", "")
ADVICE = Advice(Split(6, 2, True), Split(4, 4, True), 1.9, 0.6, 0.1)


def series(metrics: OperatorMetrics) -> dict[str, float]:
    """Series of jobs: `name{role}` -> value."""
    return {
        f"{sample.name}{sample.labels.get('role', '')}": sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.labels.get("name") == "demo"
    }


def test_the_fastest_split_is_shown_once_it_is_known() -> None:
    metrics = OperatorMetrics()
    metrics.show(KEY, INFO, RLJobStatus(), None)
    assert not [name for name in series(metrics) if name.startswith("rljob_plan")]
    metrics.show(KEY, INFO, RLJobStatus(), ADVICE)
    shown = {name: value for name, value in series(metrics).items() if "plan" in name}
    assert shown == {
        "rljob_plan_speedup": 1.9,
        "rljob_plan_devicesrollout": 4,
        "rljob_plan_devicestrainer": 4,
    }


def test_series_go_with_their_job() -> None:
    metrics = OperatorMetrics()
    metrics.show(KEY, INFO, RLJobStatus(), ADVICE)
    metrics.forget(KEY)
    assert series(metrics) == {}
