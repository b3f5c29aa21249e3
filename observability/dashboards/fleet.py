"""Dashboard of all jobs: states, devices, queues and restarts."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from observability import recording as rec
from observability.dashboards.frame import frame
from observability.panels import (
    COUNT,
    JOBS,
    NUMBER,
    SECONDS,
    SHARE,
    Column,
    Panel,
    above,
    below,
    grid,
    lines,
    none,
    number,
    states,
)

_USEFUL = 'category=~"trained|generated"'


def dashboard() -> Dashboard:
    return frame(
        "fleet",
        "All jobs: states, devices, queues and restarts.",
        {"Now": _now(), "Jobs": _jobs(), "Devices": _devices(), "Restarts and queues": _trouble()},
    )


def _jobs_in(state: int) -> str:
    return f"count({rec.STATE}{{{JOBS}}} == {state}) or vector(0)"


def _now() -> list[Panel]:
    devices = f"sum({rec.CATEGORIES}{{{JOBS}}})"
    goodput = f"sum({rec.CATEGORIES}{{{JOBS},{_USEFUL}}}) / ({devices} > 0)"
    firing = f'count(ALERTS{{alertname=~"Sluice.+",alertstate="firing",{JOBS}}}) or vector(0)'
    # fmt: off
    return [
        number("Running", COUNT, none(), "Running jobs.",
               {"jobs": _jobs_in(1)}),
        number("Queued", COUNT, above(5, 20), "Jobs that wait for admission.",
               {"jobs": _jobs_in(2)}),
        number("Failed", COUNT, above(1), "Jobs that ended with an error.",
               {"jobs": _jobs_in(4)}),
        number("Devices", COUNT, none(),
               "GPUs held by jobs, mean over 10 minutes. On CPUs a pod counts as one.",
               {"devices": devices}),
        number("Goodput", SHARE, below(0.3, 0.6),
               "Share of device time that trained or generated what was trained on.",
               {"goodput": goodput}),
        number("Alerts", COUNT, above(1, 5), "Firing alerts of this chart.",
               {"alerts": firing}),
    ]
    # fmt: on


def _jobs() -> list[Panel]:
    rewards = f"max by (namespace, job) (sluice_trainer_reward{{{JOBS}}})"
    engines = f"max by (namespace, job) (sluice_rendezvous_engines{{{JOBS}}})"
    columns = [
        Column("State", f"{rec.STATE}{{{JOBS}}}", NUMBER, none(), rec.STATES),
        Column("Progress", f"{rec.PROGRESS}{{{JOBS}}}", SHARE, none()),
        Column("Step", f"{rec.STEP}{{{JOBS}}}", NUMBER, none()),
        Column("Reward", rewards, NUMBER, none()),
        Column("Goodput", f"{rec.GOODPUT}{{{JOBS}}}", SHARE, below(0.3, 0.6)),
        Column("Speedup of best split", f"{rec.SPEEDUP}{{{JOBS}}}", NUMBER, none()),
        Column("Engines", engines, NUMBER, below(1)),
        Column(
            "Restarts in 1 h",
            f"sum by (namespace, job) ({rec.RESTARTS}{{{JOBS}}})",
            NUMBER,
            above(1, 4),
        ),
    ]
    link = (
        "/d/sluice-job?var-namespace=${__data.fields.Namespace}&var-job=${__data.fields.Job}"
        "&var-datasource=${datasource}&${__url_time_range}"
    )
    # fmt: off
    return [
        grid(
            "Jobs",
            "One row per job. A click on its name opens its dashboard.",
            {"namespace": "Namespace", "job": "Job"},
            columns,
            link,
        ),
        states(
            "States",
            "State of each job over time, from the conditions in its status.",
            rec.STATES,
            {"{{namespace}}/{{job}}": f"{rec.STATE}{{{JOBS}}}"},
        ),
    ]
    # fmt: on


def _devices() -> list[Panel]:
    # fmt: off
    return [
        lines("Devices by activity", COUNT, none(),
              "Devices of all jobs, mean over 10 minutes; trained and generated count as goodput.",
              {"{{category}}": f"sum by (category) ({rec.CATEGORIES}{{{JOBS}}})"},
              width=12, stacked=True),
        lines("Goodput by job", SHARE, below(0.3, 0.6),
              "Share of a job's device time that trained or generated what was trained on.",
              {"{{namespace}}/{{job}}": f"{rec.GOODPUT}{{{JOBS}}}"}, width=12, highest=1),
    ]
    # fmt: on


def _trouble() -> list[Panel]:
    started = "sum by (le) (rate(rljob_time_to_running_seconds_bucket[6h]))"
    # fmt: off
    return [
        lines("Restarts", COUNT, above(4), "Attempts that replaced a failed one within an hour.",
              {"{{namespace}}/{{job}}": f"sum by (namespace, job) ({rec.RESTARTS}{{{JOBS}}})"}),
        lines("Time to running", SECONDS, above(600, 3600),
              "From a job's start until it first ran, over the last 6 hours.",
              {"median": f"histogram_quantile(0.5, {started})",
               "95th percentile": f"histogram_quantile(0.95, {started})"}),
        lines("Queue", COUNT, none(), "Jobs by state.",
              {rec.STATES[code][0]: _jobs_in(code) for code in (0, 1, 2)}),
    ]
    # fmt: on
