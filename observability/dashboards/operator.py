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
    above,
    lines,
    none,
    number,
)

_OURS = '{controller="rljob"}'
# Keeps series of our operator alone: other operators have metrics of the same names.
_OPERATOR = f"on (instance) controller_runtime_max_concurrent_reconciles{_OURS}"


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
    # fmt: off
    return [
        number("Leaders", COUNT, ((None, "red"), (1, "green"), (2, "red")),
               "Replicas that work: one of them.",
               {"leaders": f"sum(leader_election_master_status and {_OPERATOR})"}, width=6),
        number("Workers", COUNT, none(), "Workers that work on a job now.",
               {"workers": f"sum(controller_runtime_active_workers{_OURS})"}, width=6),
        number("Errors", PER_SECOND, above(0.01, 0.1), "Failed passes in a second.",
               {"errors": errors}, width=6),
        number("Memory", BYTES, above(400000000.0, 500000000.0), "Of the replica that has most.",
               {"memory": f"max(process_resident_memory_bytes and {_OPERATOR})"}, width=6),
        lines("Passes", PER_SECOND, none(), "Passes over a job in a second, by result.",
              {"{{result}}": passes}),
        lines("Time of a pass", SECONDS, above(1, 10),
              "How long the operator works on a job at a time.",
              promql.spread("controller_runtime_reconcile_time_seconds",
                            selector='controller="rljob"')),
        lines("Requests to the API server", PER_SECOND, none(),
              "By method and code. error: no answer; 429: it is short of time.",
              {"{{method}} {{code}}": calls}),
    ]
    # fmt: on


def _queue() -> list[Panel]:
    ours = '{name="rljob"}'
    # fmt: off
    return [
        lines("Jobs that wait for a worker", COUNT, above(10, 100),
              "Depth of the work queue. For long above 0: more workers (values: workers).",
              {"jobs": f"sum(workqueue_depth{ours})"}),
        lines("Time in the queue", SECONDS, above(1, 10), "How long jobs waited for a worker.",
              promql.spread("workqueue_queue_duration_seconds", selector='name="rljob"')),
        lines("Retries", PER_SECOND, above(0.1, 1),
              "Jobs that came back after a failed pass, in a second.",
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
              "Prompt groups: with workers, finished and waiting for a batch, waiting for a "
              "worker.",
              {"with workers": _buffer("leases_groups"),
               "finished": _buffer("depth_groups"),
               "given back": _buffer("returned_groups")}),
        lines("Groups by outcome", PER_SECOND, none(),
              "In a second. Filtered, failed and outdated ones are generated in vain.",
              {name: _rate(f"groups_{name}_total") for name in outcomes}),
        lines("Generated in vain", SHARE, above(0.2, 0.5),
              "Share of the finished groups of which no step was made; steps trained again.",
              {"groups": f"{rec.WASTED}{{{JOB}}}", "steps": f"{rec.REDONE}{{{JOB}}}"}, highest=1),
        lines("Failed groups by reason", COUNT, above(1, 100),
              "Groups that failed for good, since the job began.",
              {"{{reason}}": reasons}, width=12),
        lines("Leases", PER_SECOND, none(),
              "Leases granted, and those that expired since their worker fell silent.",
              {"granted": _rate("leases_granted_total"), "expired": _rate("leases_expired_total")},
              width=12),
    ]
    # fmt: on


def _room() -> list[Panel]:
    takes = promql.quantile(0.95, "sluice_buffer_take_seconds", "call")
    # fmt: off
    return [
        lines("Storage used", SHARE, above(0.75, 0.9),
              "Share of the claim that holds samples. Above 0.9 checkpoints come early.",
              {"used": f"{rec.STORAGE}{{{JOB}}}"}, highest=1),
        lines("Memory of messages", BYTES, none(),
              "Of what is received, written or sent; who has no room waits.",
              {"now": _buffer("under_way_bytes"), "limit": _buffer("under_way_limit_bytes")}),
        lines("Received", BYTES_PER_SECOND, none(), "Bytes of groups in a second.",
              {"received": _rate("received_bytes_total")}),
        lines("Time to take a group", SECONDS, above(1, 10),
              "95th percentile, until it is on disk and answered.",
              {"{{call}}": takes}),
        lines("Workers wait for prompts", SECONDS, none(),
              "How long a worker waits for a lease. In sync mode it waits for the trainer.",
              promql.spread("sluice_buffer_lease_wait_seconds")),
        lines("Trainer waits for a batch", SECONDS, none(),
              "How long the trainer waits for a batch, once it has asked.",
              promql.spread("sluice_buffer_batch_wait_seconds")),
    ]
    # fmt: on
