"""The operator, and the buffers of jobs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from observability import promql
from observability import recording as rec
from observability.dashboards.frame import frame
from observability.panels import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    JOB,
    PER_SECOND,
    RATE,
    SECONDS,
    SHARE,
    Panel,
    Query,
    above,
    lines,
    none,
    number,
)

_OURS = '{controller="rljob"}'
_OPERATOR = f"on (instance) controller_runtime_max_concurrent_reconciles{_OURS}"
"""Keeps series of our operator alone: other operators have metrics of the same names."""


def dashboard() -> Dashboard:
    return frame(
        "operator",
        "The operator's work, and the buffers of jobs.",
        {
            "Operator": _operator(),
            "Work queue": _queue(),
            "Buffer: groups": _groups(),
            "Buffer: time and room": _room(),
        },
        one_job=True,
    )


def _operator() -> list[Panel]:
    passes = f"sum by (result) (rate(controller_runtime_reconcile_total{_OURS}[{RATE}]))"
    errors = f"sum(rate(controller_runtime_reconcile_errors_total{_OURS}[{RATE}])) or vector(0)"
    calls = f"sum by (method, code) (rate(rest_client_requests_total[{RATE}]) and {_OPERATOR})"
    return [
        number(
            "Leaders",
            "Replicas that work: one of them.",
            COUNT,
            ((None, "red"), (1, "green"), (2, "red")),
            Query(f"sum(leader_election_master_status and {_OPERATOR})", "leaders"),
            width=6,
        ),
        number(
            "Workers",
            "Workers that work on a job now.",
            COUNT,
            none(),
            Query(f"sum(controller_runtime_active_workers{_OURS})", "workers"),
            width=6,
        ),
        number(
            "Errors",
            "Failed passes in a second.",
            PER_SECOND,
            above(0.01, 0.1),
            Query(errors, "errors"),
            width=6,
        ),
        number(
            "Memory",
            "Of the replica that has most.",
            BYTES,
            above(400e6, 500e6),
            Query(f"max(process_resident_memory_bytes and {_OPERATOR})", "memory"),
            width=6,
        ),
        lines(
            "Passes",
            "Passes over a job in a second, by result.",
            PER_SECOND,
            none(),
            Query(passes, "{{result}}"),
        ),
        lines(
            "Time of a pass",
            "How long the operator works on a job at a time.",
            SECONDS,
            above(1, 10),
            *promql.spread(
                "controller_runtime_reconcile_time_seconds", selector='controller="rljob"'
            ),
        ),
        lines(
            "Requests to the API server",
            "By method and code. error: no answer; 429: it is short of time.",
            PER_SECOND,
            none(),
            Query(calls, "{{method}} {{code}}"),
        ),
    ]


def _queue() -> list[Panel]:
    ours = '{name="rljob"}'
    return [
        lines(
            "Jobs that wait for a worker",
            "Depth of the work queue. For long above 0: more workers (values: workers).",
            COUNT,
            above(10, 100),
            Query(f"sum(workqueue_depth{ours})", "jobs"),
        ),
        lines(
            "Time in the queue",
            "How long jobs waited for a worker.",
            SECONDS,
            above(1, 10),
            *promql.spread("workqueue_queue_duration_seconds", selector='name="rljob"'),
        ),
        lines(
            "Retries",
            "Jobs that came back after a failed pass, in a second.",
            PER_SECOND,
            above(0.1, 1),
            Query(f"sum(rate(workqueue_retries_total{ours}[{RATE}]))", "retries"),
        ),
    ]


def _buffer(metric: str) -> str:
    return promql.newest(f"sluice_buffer_{metric}")


def _rate(metric: str) -> str:
    return promql.rate(f"sluice_buffer_{metric}")


def _groups() -> list[Panel]:
    reasons = f"sum by (reason) (sluice_buffer_groups_failed_by_reason_total{{{JOB}}})"
    outcomes = ("trained", "filtered", "failed", "outdated")
    return [
        lines(
            "Groups",
            "Prompt groups: with workers, finished and waiting for a batch, waiting for a worker.",
            COUNT,
            none(),
            Query(_buffer("leases_groups"), "with workers"),
            Query(_buffer("depth_groups"), "finished"),
            Query(_buffer("returned_groups"), "given back"),
        ),
        lines(
            "Groups by what became of them",
            "In a second. Filtered, failed and outdated ones are generated in vain.",
            PER_SECOND,
            none(),
            *(Query(_rate(f"groups_{name}_total"), name) for name in outcomes),
        ),
        lines(
            "Generated in vain",
            "Share of the finished groups of which no step was made; steps trained again.",
            SHARE,
            above(0.2, 0.5),
            Query(f"{rec.WASTED}{{{JOB}}}", "groups"),
            Query(f"{rec.REDONE}{{{JOB}}}", "steps"),
            highest=1,
        ),
        lines(
            "Failed groups by reason",
            "Groups that failed for good, since the job began.",
            COUNT,
            above(1, 100),
            Query(reasons, "{{reason}}"),
            width=12,
        ),
        lines(
            "Leases",
            "Leases granted, and those that expired since their worker fell silent.",
            PER_SECOND,
            none(),
            Query(_rate("leases_granted_total"), "granted"),
            Query(_rate("leases_expired_total"), "expired"),
            width=12,
        ),
    ]


def _room() -> list[Panel]:
    takes = promql.quantile(0.95, "sluice_buffer_take_seconds", "call")
    return [
        lines(
            "Storage used",
            "Share of the claim that holds samples. Above 0.9 checkpoints come early.",
            SHARE,
            above(0.75, 0.9),
            Query(f"{rec.STORAGE}{{{JOB}}}", "used"),
            highest=1,
        ),
        lines(
            "Memory of messages",
            "Of what is received, written or sent; who has no room waits.",
            BYTES,
            none(),
            Query(_buffer("under_way_bytes"), "now"),
            Query(_buffer("under_way_limit_bytes"), "limit"),
        ),
        lines(
            "Received",
            "Bytes of groups in a second.",
            BYTES_PER_SECOND,
            none(),
            Query(_rate("received_bytes_total"), "received"),
        ),
        lines(
            "Time to take a group",
            "95th percentile, until it is on disk and answered.",
            SECONDS,
            above(1, 10),
            Query(takes, "{{call}}"),
        ),
        lines(
            "Workers wait for prompts",
            "How long a worker waits for a lease. In sync mode it waits for the trainer.",
            SECONDS,
            none(),
            *promql.spread("sluice_buffer_lease_wait_seconds"),
        ),
        lines(
            "Trainer waits for a batch",
            "How long the trainer waits for a batch, once it has asked.",
            SECONDS,
            none(),
            *promql.spread("sluice_buffer_batch_wait_seconds"),
        ),
    ]
