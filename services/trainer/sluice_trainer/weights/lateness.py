"""Lateness of an engine in an update, judged by the time that the other engines take.

An engine is late if it is the only one that has not passed a step, and it takes more than `FACTOR`
times as long as the slowest other engine and at least `floor` seconds. Without another engine no
engine is late: then only the deadline of the phase and the engine's membership count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

FACTOR = 2.0
# The first transfer over a communicator creates it, which takes NCCL seconds.
CONNECTING = 10.0


class StepTimes:
    """Seconds that engines took for each step, in this update and in their last one."""

    def __init__(self, floor: float) -> None:
        """Start without measurements; `floor` is `lateSeconds`, within which no engine is late."""
        self.floor = floor
        self._earlier: dict[str, dict[str, float]] = {}
        self._present: dict[str, dict[str, float]] = {}

    def begin(self) -> None:
        """Begin an update: the measurements of the previous one become history."""
        for step, seconds in self._present.items():
            self._earlier.setdefault(step, {}).update(seconds)
        self._present = {}

    def keep(self, engines: Collection[str]) -> None:
        """Forget all other engines."""
        for measured in (self._earlier, self._present):
            for step, seconds in measured.items():
                measured[step] = {name: s for name, s in seconds.items() if name in engines}

    def has_others(self, engine: str) -> bool:
        """Return True if another engine has taken part in an update."""
        return any(seconds.keys() - {engine} for seconds in self._earlier.values())

    def passed(self, step: str, engine: str, seconds: float) -> None:
        """Record that an engine has passed a step; of several buckets the slowest one counts."""
        seconds_of = self._present.setdefault(step, {})
        seconds_of[engine] = max(seconds, seconds_of.get(engine, 0.0))

    def limit(
        self,
        step: str,
        engine: str,
        passed: Mapping[str, float],
        suspects: Collection[str],
        *,
        connecting: bool,
    ) -> float | None:
        """Return the seconds after which an engine is late in a step; None if it has no comparison.

        Parameters
        ----------
        step
            Name of the step.
        engine
            The engine, which has not passed the step.
        passed
            Seconds of the engines that have passed it in this update.
        suspects
            Engines that have not passed it, including `engine`, without those that wait for an
            upstream engine. If they outnumber the engines that have passed, the cause is not
            theirs.
        connecting
            True if the engine's communicator is being created.

        """
        if passed or len(suspects) > 1:
            others = list(passed.values()) if len(passed) >= len(suspects) else []
        else:  # alone in this update, or all others wait for it: compare with their last update
            earlier = self._earlier.get(step, {})
            others = [seconds for name, seconds in earlier.items() if name != engine]
        if not others:
            return None
        return max(self.floor * (CONNECTING if connecting else 1.0), FACTOR * max(others))
