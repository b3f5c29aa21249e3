"""The time that a process has spent in each of its phases, as a counter for Prometheus."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from threading import Lock

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class Phases(Collector):
    """Seconds by phase. The phase under way counts up to the moment of the scrape, so that a long
    one shows before it is over. May be used from any thread.
    """

    def __init__(
        self,
        name: str,
        text: str,
        *,
        first: str,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._text, self._clock = name, text, clock
        self._phase, self._since = first, clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = Lock()
        registry.register(self)

    def enter(self, phase: str) -> None:
        with self._lock:
            now = self._clock()
            self._seconds[self._phase] += now - self._since
            self._phase, self._since = phase, now

    def seconds(self) -> dict[str, float]:
        """Seconds by phase until now."""
        with self._lock:
            under_way = self._clock() - self._since
            before = self._seconds[self._phase]
            return {**self._seconds, self._phase: before + under_way}

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=["phase"])
        for phase, seconds in sorted(self.seconds().items()):
            family.add_metric([phase], seconds)
        yield family
