"""Prometheus metrics of the rendezvous: members, the weights they hold, times of updates."""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice_rendezvous.device_time import DeviceTime
from sluice_rendezvous.registry import Registry

# Label for a member's role. The label `role` is taken: the scrape sets it to `rendezvous` on all
# series.
MEMBER = "member_role"
JOINS = Counter("sluice_rendezvous_joins", "Members that joined, or joined again.", [MEMBER])
LEAVES = Counter("sluice_rendezvous_leaves", "Members whose stream ended.", [MEMBER])
DROPS = Counter(
    "sluice_rendezvous_drops",
    "Members dropped from the epoch. cause: the phase of a weight update in which an engine "
    "failed, or silent.",
    ["cause"],
)
UPDATE_SECONDS = Histogram(
    "sluice_rendezvous_update_seconds",
    "Time from an update's beginning until its engines had passed a phase, as their source "
    "reported it.",
    ["phase"],
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300),
)


class Updates:
    """Measures weight updates, which come one after the other."""

    def __init__(self) -> None:
        self._began: float | None = None

    def begin(self, now: float) -> None:
        self._began = now

    def passed(self, phase: str, now: float) -> None:
        """Note that the engines of one trainer rank have passed a phase."""
        if self._began is not None:
            UPDATE_SECONDS.labels(phase).observe(now - self._began)


class ServiceState(Protocol):
    """The parts of the service that metrics show."""

    registry: Registry
    device_time: DeviceTime


class StateCollector(Collector):
    """Turns the service's state into metrics at each scrape.

    The service's event loop may change the state meanwhile, so it is copied first.
    """

    def __init__(self, service: ServiceState) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        registry = self._service.registry
        yield GaugeMetricFamily(
            "sluice_rendezvous_epoch",
            "Membership epoch: it grows when a member joins, leaves or is dropped.",
            value=registry.epoch,
        )
        yield GaugeMetricFamily(
            "sluice_rendezvous_version",
            "Newest weight version that an update has begun; -1: none.",
            value=registry.version,
        )
        entries = list(registry.entries.values())
        members = GaugeMetricFamily(
            "sluice_rendezvous_members", "Members that have joined.", labels=[MEMBER]
        )
        for role, count in sorted(Count(entry.role for entry in entries).items()):
            members.add_metric([role], count)
        yield members
        engines = [entry for entry in entries if entry.role == "rollout" and entry.index == 0]
        yield GaugeMetricFamily(
            "sluice_rendezvous_engines", "Rollout engines that have joined.", value=len(engines)
        )
        behind = sum(entry.lacks(registry.version) for entry in engines)
        yield GaugeMetricFamily(
            "sluice_rendezvous_engines_behind",
            "Engines that do not serve the newest version.",
            value=behind,
        )
        seconds = CounterMetricFamily(
            "sluice_rendezvous_device_seconds",
            "Time of the job's GPUs by role and state; a gang on CPUs counts as one.",
            labels=[MEMBER, "state"],
        )
        for (role, state), value in sorted(
            self._service.device_time.seconds(time.monotonic()).items()
        ):
            seconds.add_metric([role, state], value)
        yield seconds
