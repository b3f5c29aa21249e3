"""The buffer's statistics: the answer to the Stats call, and Prometheus metrics made from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.wire.v1 import buffer_pb2 as pb
from sluice_buffer.core import Buffer
from sluice_buffer.group import GroupState
from sluice_buffer.rules.admission import admitted

_ALWAYS = (
    "groups_submitted",
    "groups_returned",
    "groups_outdated",
    "leases_granted",
    "leases_expired",
    "samples_failed",
    "stale_groups",
    "steps_redone",
    "submits_duplicate",
    "submits_stale",
    "submits_refused",
    "rewinds",
    "storage_full",
)
_GAUGES = {
    "step": "Last committed step",
    "total_steps": "Steps of the job",
    "version": "Last committed weight version",
    "checkpoint_step": "Step of the last checkpoint",
    "depth": "Finished groups that wait for a batch",
    "leases": "Groups in work",
    "returned": "Groups that wait for a worker again",
    "started": "Groups started, without filtered and failed ones",
    "admitted": "Groups that may be started at the present version",
    "policy_lag": "Mean versions between a sample's oldest weights and the weights that its batch "
    "was taken at",
    "stored_bytes": "Bytes of samples and images in the storage",
    "capacity_bytes": "Bytes of samples and images that the storage can hold",
    "image_bytes": "Bytes of images in the storage, each counted once",
    "epoch": "Epoch of the newest prompt",
    "under_way_bytes": "Memory of messages that are being received, written or sent",
    "under_way_peak_bytes": "Largest value of sluice_buffer_under_way_bytes so far",
    "under_way_limit_bytes": "Limit of sluice_buffer_under_way_bytes: messages beyond it wait",
}
# Counters of the statistics that may also fall.
_LEVELS = ("groups_in_work", "groups_stored")
_UNITS = {
    "depth": "depth_groups",
    "leases": "leases_groups",
    "returned": "returned_groups",
    "started": "started_groups",
    "admitted": "admitted_groups",
    "policy_lag": "policy_lag_versions",
}
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

TAKE_SECONDS = Histogram(
    "sluice_buffer_take_seconds",
    "Time from the last byte of a group until it is on disk and answered. call: submit, return.",
    ["call"],
    buckets=_SECONDS,
    registry=None,
)
TRANSITION_SECONDS = Histogram(
    "sluice_buffer_transition_seconds",
    "Time of any other change of the buffer, until it is on disk.",
    buckets=_SECONDS,
    registry=None,
)
LEASE_WAIT_SECONDS = Histogram(
    "sluice_buffer_lease_wait_seconds",
    "Time that a worker waited for prompts, whether it got any or not.",
    buckets=_SECONDS,
    registry=None,
)
BATCH_WAIT_SECONDS = Histogram(
    "sluice_buffer_batch_wait_seconds",
    "Time from a trainer's first request for a batch until it was complete.",
    buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600),
    registry=None,
)
RECEIVED_BYTES = Counter("sluice_buffer_received_bytes", "Bytes of groups received.", registry=None)
_KEPT = (TAKE_SECONDS, TRANSITION_SECONDS, LEASE_WAIT_SECONDS, BATCH_WAIT_SECONDS, RECEIVED_BYTES)


def stats(buffer: Buffer) -> pb.BufferStats:
    """Return the answer to Stats, without the bytes under way, which only the service knows."""
    memory, progress = buffer.memory, buffer.memory.progress
    newest = max(memory.results, default=None)
    results = memory.results[newest] if newest is not None else []
    buffer.capacity.free_bytes()  # refreshes total_bytes
    return pb.BufferStats(
        step=progress.step,
        total_steps=buffer.batches.last_step,
        version=progress.step,
        checkpoint_step=progress.checkpoint_step,
        trainer_attempt=progress.trainer_attempt,
        depth=len(memory.finished),
        leases=len(memory.deadlines),
        returned=memory.counts[GroupState.WAITING],
        started=memory.kept,
        admitted=admitted(buffer.policy, progress.step),
        counters=counters(buffer),
        metrics=progress.metrics,
        evaluation={f"eval/{result.dataset}": result.metrics["reward"] for result in results},
        policy_lag=progress.lag,
        stored_bytes=memory.stored_bytes,
        capacity_bytes=buffer.capacity.total_bytes,
        epoch=max(0, progress.next_group - 1) // buffer.prompts.order.epoch_size,
        waiting_for=buffer.waiting_for(),
        failed=progress.failed,
        image_bytes=memory.images.total,
        images=len(memory.images.heads),
    )


def counters(buffer: Buffer) -> dict[str, int]:
    """Return totals since the job's start: fates of groups and samples, and rare events."""
    memory = buffer.memory
    return {
        **dict.fromkeys(_ALWAYS, 0),
        **memory.progress.counters,
        "commits": buffer.storage.commits,
        "groups_leased": memory.progress.next_group,
        "groups_trained": memory.trained,
        "samples_trained": memory.trained * buffer.policy.samples_per_prompt,
        "groups_filtered": memory.counts[GroupState.FILTERED],
        "groups_failed": memory.counts[GroupState.FAILED],
        "groups_in_work": memory.counts[GroupState.LEASED] + memory.counts[GroupState.WAITING],
        "groups_stored": memory.stored_groups,
        "groups_lost": memory.lost,
        "groups_trained_twice": memory.twice,
    }


class _Stats(Collector):
    """Turns one snapshot of the statistics into metrics at each scrape."""

    def __init__(self, snapshot: Callable[[], pb.BufferStats]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        stats = self._snapshot()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(
                f"sluice_buffer_{_UNITS.get(name, name)}", text, value=float(getattr(stats, name))
            )
        yield from _counter_metrics(stats.counters)
        failed = CounterMetricFamily(
            "sluice_buffer_groups_failed_by_reason",
            "Groups that failed for good, by reason",
            labels=["reason"],
        )
        for reason, count in sorted(stats.failed.items()):
            failed.add_metric([reason], float(count))
        yield failed
        reward = GaugeMetricFamily(
            "sluice_buffer_evaluation_reward",
            "Mean reward of the newest evaluation",
            labels=["dataset"],
        )
        for name, mean in sorted(stats.evaluation.items()):
            reward.add_metric([name.removeprefix("eval/")], mean)
        yield reward


def _counter_metrics(counters: Mapping[str, int]) -> Iterator[Metric]:
    """Make a metric for each counter.

    Counters `name:source` become one metric with the label `source`.
    """
    by_source: dict[str, CounterMetricFamily] = {}
    for name, value in sorted(counters.items()):
        name, _, source = name.partition(":")
        metric = f"sluice_buffer_{re.sub('[^a-z0-9_]', '_', name)}"
        if not source:
            family = GaugeMetricFamily if name in _LEVELS else CounterMetricFamily
            yield family(metric, f"Counter {name}", value=float(value))
            continue
        sources = by_source.setdefault(
            name, CounterMetricFamily(metric, f"Counter {name}", labels=["source"])
        )
        sources.add_metric([source], float(value))
    yield from by_source.values()


def registry(snapshot: Callable[[], pb.BufferStats]) -> CollectorRegistry:
    """Return the registry that Prometheus scrapes.

    `snapshot` must be safe to call from any thread.
    """
    collectors = CollectorRegistry()
    for collector in (_Stats(snapshot), *_KEPT):
        collectors.register(collector)
    return collectors
