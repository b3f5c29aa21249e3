"""The time that a process has spent in each of its phases, as a counter for Prometheus."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
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
        before: float = 0.0,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """before: seconds of the first phase that are over already."""
        self._name, self._text, self._clock = name, text, clock
        self._phase, self._since = first, clock() - before
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


class Laps:
    """Seconds by phase between two laps' ends: together all seconds of the process."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._before: dict[str, float] = {}

    def next(self) -> dict[str, float]:
        """End a lap. Phases that it has no seconds of are left out."""
        now = self._phases.seconds()
        lap = {phase: until - self._before.get(phase, 0.0) for phase, until in now.items()}
        self._before = now
        return {phase: seconds for phase, seconds in lap.items() if seconds > 0}


def process_age() -> float:
    """Seconds since the kernel has started this process: before its imports, and before the
    programs that it was until an `exec`.
    """
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
