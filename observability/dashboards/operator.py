"""Dashboard of the operator, and of the jobs' buffers."""

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
    above,
    lines,
    none,
    number,
)

_OURS = '{controller="rljob"}'
# Keeps the series of sluice's operator: other operators have metrics of the same names.
_OPERATOR = f"on (instance) controller_runtime_max_concurrent_reconciles{_OURS}"


def dashboard() -> Dashboard:
    return frame(
        "operator",
        "The operator, and the buffers of jobs.",
        {
            "Operator": _operator(),
            "Work queue": _queue(),
            "Buffer: groups": _groups(),
            "Buffer: time and space": _space(),
        },
        one="job",
    )


def _operator() -> list[Panel]:
    passes = f"sum by (result) (rate(controller_runtime_reconcile_total{_OURS}[{RATE}]))"
    errors = f"sum(rate(controller_runtime_reconcile_errors_total{_OURS}[{RATE}])) or vector(0)"
    calls = f"sum by (method, code) (rate(rest_client_requests_total[{RATE}]) and {_OPERATOR})"
    # fmt: off
    return [
        number("Leaders", COUNT, ((None, "red"), (1, "green"), (2, "red")),
               "Leading replicas; exactly one is expected.",
               {"leaders": f"sum(leader_election_master_status and {_OPERATOR})"}, width=6),
        number("Workers", COUNT, none(), "Busy workers.",
               {"workers": f"sum(controller_runtime_active_workers{_OURS})"}, width=6),
        number("Errors", PER_SECOND, above(0.01, 0.1), "Failed reconcile passes per second.",
               {"errors": errors}, width=6),
        number("Memory", BYTES, above(400e6, 500e6),
               "Resident memory of the largest replica.",
               {"memory": f"max(process_resident_memory_bytes and {_OPERATOR})"}, width=6),
        lines("Reconcile passes", PER_SECOND, none(), "Reconcile passes per second, by result.",
              {"{{result}}": passes}),
        lines("Time of a reconcile pass", SECONDS, above(1, 10),
              "Duration of one pass over a job.",
              promql.spread("controller_runtime_reconcile_time_seconds",
                            selector='controller="rljob"')),
        lines("Requests to the API server", PER_SECOND, none(),
              "Requests per second by method and code. error: no answer; 429: throttled.",
              {"{{method}} {{code}}": calls}),
    ]
    # fmt: on


def _queue() -> list[Panel]:
    ours = '{name="rljob"}'
    # fmt: off
    return [
        lines("Queue depth", COUNT, above(10, 100),
              "Jobs that wait for a worker. If it stays above 0, raise the chart's value "
              "`workers`.",
              {"jobs": f"sum(workqueue_depth{ours})"}),
        lines("Time in the queue", SECONDS, above(1, 10), "Time that jobs waited for a worker.",
              promql.spread("workqueue_queue_duration_seconds", selector='name="rljob"')),
        lines("Retries", PER_SECOND, above(0.1, 1),
              "Jobs queued again after a failed pass, per second.",
              {"retries": f"sum(rate(workqueue_retries_total{ours}[{RATE}]))"}),
    ]
    # fmt: on


def _buffer(metric: str) -> str:
    return promql.newest(f"sluice_buffer_{metric}")


def _rate(metric: str) -> str:
    return promql.rate(f"sluice_buffer_{metric}")


def _groups() -> list[Panel]:
    reasons = f"sum by (reason) (sluice_buffer_groups_failed_by_reason_total{{{JOB}}})"
    outcomes = ("trained", "filtered", "failed", "outdated")
    # fmt: off
    return [
        lines("Groups", COUNT, none(),
              "Prompt groups: leased, finished and waiting for a batch, or returned for "
              "another lease.",
              {"leased": _buffer("leases_groups"),
               "finished": _buffer("depth_groups"),
               "returned": _buffer("returned_groups")}),
        lines("Groups by outcome", PER_SECOND, none(),
              "Groups per second. Filtered, failed and outdated groups are wasted.",
              {name: _rate(f"groups_{name}_total") for name in outcomes}),
        lines("Wasted work", SHARE, above(0.2, 0.5),
              "Share of finished groups that were not trained, and of steps trained again.",
              {"groups": f"{rec.WASTED}{{{JOB}}}", "steps": f"{rec.REDONE}{{{JOB}}}"}, highest=1),
        lines("Failed groups by reason", COUNT, above(1, 100),
              "Groups that failed for good since the job began.",
              {"{{reason}}": reasons}, width=12),
        lines("Leases", PER_SECOND, none(),
              "Leases granted, and leases that expired because their worker stopped responding.",
              {"granted": _rate("leases_granted_total"), "expired": _rate("leases_expired_total")},
              width=12),
    ]
    # fmt: on


def _space() -> list[Panel]:
    takes = promql.quantile(0.95, "sluice_buffer_take_seconds", "call")
    # fmt: off
    return [
        lines("Storage used", SHARE, above(0.75, 0.9),
              "Share of the volume that holds samples. Above 0.9, checkpoints are made earlier.",
              {"used": f"{rec.STORAGE}{{{JOB}}}"}, highest=1),
        lines("Message memory", BYTES, none(),
              "Messages being received, written or sent; at the limit, senders wait.",
              {"now": _buffer("under_way_bytes"), "limit": _buffer("under_way_limit_bytes")}),
        lines("Received", BYTES_PER_SECOND, none(), "Bytes of groups per second.",
              {"received": _rate("received_bytes_total")}),
        lines("Time to take a group", SECONDS, above(1, 10),
              "95th percentile of the time until a group is on disk and acknowledged.",
              {"{{call}}": takes}),
        lines("Wait for prompts", SECONDS, none(),
              "Time that a worker waits for a lease. In sync mode it waits for the trainer.",
              promql.spread("sluice_buffer_lease_wait_seconds")),
        lines("Wait for a batch", SECONDS, none(),
              "Time that the trainer waits for a batch after requesting it.",
              promql.spread("sluice_buffer_batch_wait_seconds")),
    ]
    # fmt: on
