"""Time that a process has spent in each of its phases, as a counter for Prometheus."""

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
    """Seconds by phase, safe to use from any thread.

    The current phase counts up to the moment of the scrape, so a long phase shows before it ends.

    Parameters
    ----------
    name, text
        Name and description of the metric.
    first
        Phase in which the process starts.
    before
        Seconds of the first phase that have already passed.

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
        self._name, self._text, self._clock = name, text, clock
        self._phase, self._since = first, clock() - before
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = Lock()
        registry.register(self)

    def enter(self, phase: str) -> None:
        """End the current phase and begin another."""
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
    """Splits the seconds of `Phases` into laps.

    All laps together are all seconds of the process.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._before: dict[str, float] = {}

    def next(self) -> dict[str, float]:
        """End a lap and return its seconds by phase, without phases that had none."""
        now = self._phases.seconds()
        lap = {phase: until - self._before.get(phase, 0.0) for phase, until in now.items()}
        self._before = now
        return {phase: seconds for phase, seconds in lap.items() if seconds > 0}


def process_age() -> float:
    """Return the seconds since the kernel started this process.

    That includes imports, and programs that ran in the process before an `exec`.
    """
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
