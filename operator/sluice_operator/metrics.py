"""The operator's metrics, named as in controller-runtime and kube-state-metrics.

So common dashboards work with them. A job's series exist as long as the job. They have no label for
pods, because their number must not grow with the size of a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from sluice.api import RLJobStatus
from sluice.telemetry.planner import Advice
from sluice_operator.plan.facts.model import JobKey

CONTROLLER, POOL_CONTROLLER = "rljob", "rlenginepool"
_FAST = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SLOW = (5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_VALUES = ("True", "False", "Unknown")


class QueueMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def named(kind: type, name: str, text: str, **options: object) -> object:
            return kind(f"workqueue_{name}", text, ["name"], registry=registry, **options).labels(
                CONTROLLER
            )

        self.depth: Gauge = named(Gauge, "depth", "Keys that wait for a worker.")  # type: ignore[assignment]
        self.adds: Counter = named(Counter, "adds", "Keys added.")  # type: ignore[assignment]
        self.retries: Counter = named(Counter, "retries", "Keys that came back after a failure.")  # type: ignore[assignment]
        self.queue_seconds: Histogram = named(  # type: ignore[assignment]
            Histogram, "queue_duration_seconds", "How long keys waited.", buckets=_FAST
        )
        self.work_seconds: Histogram = named(  # type: ignore[assignment]
            Histogram, "work_duration_seconds", "How long keys were worked on.", buckets=_FAST
        )
        self.unfinished: Gauge = named(  # type: ignore[assignment]
            Gauge,
            "unfinished_work_seconds",
            "For how long the keys that are worked on have been, in sum.",
        )
        self.longest: Gauge = named(  # type: ignore[assignment]
            Gauge, "longest_running_processor_seconds", "For how long the oldest of them has been."
        )


@dataclass
class _JobSeries:
    """The label values of a job's series, and the values of its counters."""

    conditions: dict[str, str] = field(default_factory=dict)
    info: tuple[str, ...] = ()
    restarts: dict[str, int] = field(default_factory=dict)
    has_advice: bool = False


class OperatorMetrics:
    """All metrics of the operator, those of the work queue included."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = registry or CollectorRegistry()
        self.registry = registry
        ProcessCollector(registry=registry)
        self.queue = QueueMetrics(registry)
        self.reconciles = Counter(
            "controller_runtime_reconcile", "Passes.", ["controller", "result"], registry=registry
        )
        self.reconcile_errors = Counter(
            "controller_runtime_reconcile_errors",
            "Passes that failed.",
            ["controller"],
            registry=registry,
        )
        self.reconcile_seconds = Histogram(
            "controller_runtime_reconcile_time_seconds",
            "A pass.",
            ["controller"],
            registry=registry,
            buckets=_FAST,
        )
        self.workers = Gauge(
            "controller_runtime_max_concurrent_reconciles",
            "Workers.",
            ["controller"],
            registry=registry,
        ).labels(CONTROLLER)
        self.active_workers = Gauge(
            "controller_runtime_active_workers",
            "Workers that work.",
            ["controller"],
            registry=registry,
        ).labels(CONTROLLER)
        self.requests = Counter(
            "rest_client_requests",
            "Requests to the API server.",
            ["method", "code"],
            registry=registry,
        )
        self.leading = Gauge(
            "leader_election_master_status", "1: this replica works.", ["name"], registry=registry
        )
        self.info = Gauge(
            "rljob_info",
            "Always 1.",
            ["namespace", "name", "uid", "engine", "transport"],
            registry=registry,
        )
        self.condition = Gauge(
            "rljob_status_condition",
            "1 for what holds.",
            ["namespace", "name", "condition", "status"],
            registry=registry,
        )
        self.restarts = Counter(
            "rljob_restarts", "Gangs restarted.", ["namespace", "name", "role"], registry=registry
        )
        self.step = Gauge("rljob_step", "Steps trained.", ["namespace", "name"], registry=registry)
        self.speedup = Gauge(
            "rljob_plan_speedup",
            "Times as fast: a step with the fastest split of the job's devices.",
            ["namespace", "name"],
            registry=registry,
        )
        self.planned = Gauge(
            "rljob_plan_devices",
            "Devices in the fastest split.",
            ["namespace", "name", "role"],
            registry=registry,
        )
        self.time_to_running = Histogram(
            "rljob_time_to_running_seconds",
            "From a job's start until it ran first.",
            registry=registry,
            buckets=_SLOW,
        )
        self._series: dict[JobKey, _JobSeries] = {}

    def request(self, method: str, code: int) -> None:
        self.requests.labels(method, str(code or "error")).inc()

    def show(
        self,
        key: JobKey,
        info: tuple[str, ...],
        status: RLJobStatus,
        advice: Advice | None = None,
    ) -> None:
        """Set a job's series.

        Parameters
        ----------
        key
            The job.
        info
            Its uid, engine and weight transport.
        status
            Its status.
        advice
            The fastest split of its devices, once that is known.

        """
        series = self._series.setdefault(key, _JobSeries())
        if series.info != info:
            _without(series.info, lambda: self.info.remove(*key, *series.info))
            self.info.labels(*key, *info).set(1)
            series.info = info
        for condition in status.conditions:
            series.conditions[condition.type] = condition.status
            for value in _VALUES:
                self.condition.labels(*key, condition.type, value).set(
                    int(value == condition.status)
                )
        for role in status.roles:
            before = series.restarts.setdefault(role.name, role.restarts)
            self.restarts.labels(*key, role.name).inc(max(role.restarts - before, 0))
            series.restarts[role.name] = role.restarts
        self.step.labels(*key).set(status.step or 0)
        if advice:
            series.has_advice = True
            self.speedup.labels(*key).set(advice.speedup)
            self.planned.labels(*key, "rollout").set(advice.best.engines)
            self.planned.labels(*key, "trainer").set(advice.best.trainer)

    def forget(self, key: JobKey) -> None:
        series = self._series.pop(key, None)
        if series is None:
            return
        _without(series.info, lambda: self.info.remove(*key, *series.info))
        for kind in series.conditions:
            for value in _VALUES:
                self.condition.remove(*key, kind, value)
        for role in series.restarts:
            self.restarts.remove(*key, role)
        if series.info:
            self.step.remove(*key)
        if series.has_advice:
            self.speedup.remove(*key)
            for role in ("rollout", "trainer"):
                self.planned.remove(*key, role)


def _without(info: tuple[str, ...], remove: Callable[[], None]) -> None:
    if info:
        remove()
