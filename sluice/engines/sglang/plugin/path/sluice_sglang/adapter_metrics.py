"""Metrics of the adapters that an engine holds, and of the jobs of a pool, beside SGLang's own.

The label `job` is the namespace and name of a job of a pool. It is empty in an engine of one job,
so the series get the label `job` of what Prometheus asks.
"""

from collections.abc import Mapping
from typing import Any


class AdapterMetrics:
    """The metrics of one process of an engine.

    A process shows a job that has left with 0: SGLang's processes leave their metrics in files,
    from which prometheus_client removes no series.
    """

    def __init__(self, *, pool: bool, registry: Any = None) -> None:
        """Make the metrics.

        Parameters
        ----------
        pool
            True if several jobs use the engine.
        registry
            Default: that of prometheus_client.

        """
        # SGLang has set where processes leave their metrics before it starts the scheduler.
        import prometheus_client

        where = registry or prometheus_client.REGISTRY

        # Ranks of tensor parallelism hold and serve the same, and one of them shows it. Data
        # parallel ones have other requests, and adapters of the same jobs.
        def gauge(name: str, text: str, ranks: Any) -> Any:
            return prometheus_client.Gauge(
                name, text, ["job"], registry=where, multiprocess_mode=ranks
            )

        def counter(name: str, text: str, *labels: str) -> Any:
            return prometheus_client.Counter(name, text, ["job", *labels], registry=where)

        self._versions = gauge(
            "sluice_adapter_versions", "Versions of the job's adapter that are held.", "livemax"
        )
        self._bytes = gauge(
            "sluice_adapter_bytes",
            "Memory of one device, outside of SGLang's slots, that the job's adapter takes: the "
            "held versions, and memory for the next one.",
            "livemax",
        )
        self._loads = counter("sluice_adapter_loads", "Versions of the job's adapter that came.")
        self._drops = counter(
            "sluice_adapter_drops", "Versions of the job's adapter that are not held any more."
        )
        if pool:
            self._tokens = counter(
                "sluice_pool_tokens", "Tokens that each job of the pool has had.", "kind"
            )
            self._waiting = gauge(
                "sluice_pool_requests_waiting",
                "Requests of the job that have not begun.",
                "livesum",
            )
            self._weights = gauge(
                "sluice_pool_job_weight", "Share of the job's tokens relative to others.", "livemax"
            )

    def loaded(self, job: str) -> None:
        self._loads.labels(job).inc()
        self._drops.labels(job)  # shown from now on, as 0

    def dropped(self, job: str) -> None:
        self._drops.labels(job).inc()

    def held(self, job: str, versions: int, size: int) -> None:
        """Show how many versions of a job's adapter are held, and their bytes."""
        self._versions.labels(job).set(versions)
        self._bytes.labels(job).set(size)

    def had(self, job: str, kind: str, tokens: int) -> None:
        """Count tokens of a job. kind: `prompt` or `generated`."""
        self._tokens.labels(job, kind).inc(tokens)

    def wait(self, waiting: Mapping[str, int], weights: Mapping[str, int]) -> None:
        """Show the waiting requests of each job; those of `weights` are all that have come."""
        for job, weight in weights.items():
            self._waiting.labels(job).set(waiting.get(job, 0))
            self._weights.labels(job).set(weight)
