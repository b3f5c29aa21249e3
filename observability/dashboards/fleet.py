"""All jobs: their states, what their devices do, queues and restarts."""

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
    Query,
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
        "All jobs: their states, what their devices do, queues and restarts.",
        {"Now": _now(), "Jobs": _jobs(), "Devices": _devices(), "Restarts and queues": _trouble()},
        one_job=False,
    )


def _now() -> list[Panel]:
    def in_state(code: int) -> Query:
        states = f"{rec.STATE}{{{JOBS}}} == {code}"
        return Query(f"count({states}) or vector(0)", "jobs")

    devices = f"sum({rec.CATEGORIES}{{{JOBS}}})"
    goodput = f"sum({rec.CATEGORIES}{{{JOBS},{_USEFUL}}}) / ({devices} > 0)"
    firing = f'count(ALERTS{{alertname=~"Sluice.+",alertstate="firing",{JOBS}}}) or vector(0)'
    return [
        number("Running", "Jobs that train now.", COUNT, none(), in_state(1)),
        number("Queued", "Jobs that wait to be admitted.", COUNT, above(5, 20), in_state(2)),
        number("Failed", "Jobs that have ended by an error.", COUNT, above(1), in_state(4)),
        number(
            "Devices",
            "GPUs that jobs hold, mean of 10 minutes. On CPUs a pod counts as one.",
            COUNT,
            none(),
            Query(devices, "devices"),
        ),
        number(
            "Goodput",
            "Share of all device time that trained or generated what was trained on.",
            SHARE,
            below(0.3, 0.6),
            Query(goodput, "goodput"),
        ),
        number(
            "Alerts",
            "Alerts of this chart that fire.",
            COUNT,
            above(1, 5),
            Query(firing, "alerts"),
        ),
    ]


def _jobs() -> list[Panel]:
    rewards = f"max by (namespace, job) (sluice_trainer_reward{{{JOBS}}})"
    engines = f"max by (namespace, job) (sluice_rendezvous_engines{{{JOBS}}})"
    columns = [
        Column("State", f"{rec.STATE}{{{JOBS}}}", NUMBER, none(), rec.STATES),
        Column("Progress", f"{rec.PROGRESS}{{{JOBS}}}", SHARE, none()),
        Column("Step", f"{rec.STEP}{{{JOBS}}}", NUMBER, none()),
        Column("Reward", rewards, NUMBER, none()),
        Column("Goodput", f"{rec.GOODPUT}{{{JOBS}}}", SHARE, below(0.3, 0.6)),
        Column("Gain of another split", f"{rec.SPEEDUP}{{{JOBS}}}", NUMBER, none()),
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
    return [
        grid(
            "Jobs",
            "One row for each job. A click on its name opens its dashboard.",
            {"namespace": "Namespace", "job": "Job"},
            columns,
            link,
        ),
        states(
            "States",
            "State of each job over time, from the conditions of its status.",
            rec.STATES,
            Query(f"{rec.STATE}{{{JOBS}}}", "{{namespace}}/{{job}}"),
        ),
    ]


def _devices() -> list[Panel]:
    return [
        lines(
            "Devices by what they do",
            "Devices of all jobs, mean of 10 minutes: trained and generated count as goodput.",
            COUNT,
            none(),
            Query(f"sum by (category) ({rec.CATEGORIES}{{{JOBS}}})", "{{category}}"),
            width=12,
            stacked=True,
        ),
        lines(
            "Goodput of each job",
            "Share of a job's device time that trained or generated what was trained on.",
            SHARE,
            below(0.3, 0.6),
            Query(f"{rec.GOODPUT}{{{JOBS}}}", "{{namespace}}/{{job}}"),
            width=12,
            highest=1,
        ),
    ]


def _trouble() -> list[Panel]:
    started = "sum by (le) (rate(rljob_time_to_running_seconds_bucket[6h]))"
    return [
        lines(
            "Restarts",
            "Attempts that replaced a failed one, within an hour.",
            COUNT,
            above(4),
            Query(f"sum by (namespace, job) ({rec.RESTARTS}{{{JOBS}}})", "{{namespace}}/{{job}}"),
        ),
        lines(
            "Time to running",
            "From a job's start until it ran first, of jobs of the last 6 hours.",
            SECONDS,
            above(600, 3600),
            Query(f"histogram_quantile(0.5, {started})", "median"),
            Query(f"histogram_quantile(0.95, {started})", "95th percentile"),
        ),
        lines(
            "Queue",
            "Jobs by state.",
            COUNT,
            none(),
            *(
                Query(f"count({rec.STATE}{{{JOBS}}} == {code}) or vector(0)", word)
                for code, (word, _) in rec.STATES.items()
                if word in ("pending", "running", "queued")
            ),
        ),
    ]
