"""Lateness of an engine in an update, judged by the time that the others take.

An engine is late when it alone has not passed a step that the others have passed, and takes more
than `FACTOR` times as long as the slowest of them, and at least `floor` seconds. Without another
engine nobody is late: then the deadline of the phase counts, and the engine's membership.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

FACTOR = 2.0
# The first transfer over a communicator makes it, which takes NCCL seconds.
CONNECTING = 10.0


class StepTimes:
    """Seconds that engines took for each step, in this update and in their last one."""

    def __init__(self, floor: float) -> None:
        """Floor: seconds for which an engine is never late (`weightSync.lateSeconds`)."""
        self.floor = floor
        self._earlier: dict[str, dict[str, float]] = {}
        self._present: dict[str, dict[str, float]] = {}

    def begin(self) -> None:
        """Begin an update: what was measured in the one before is now history."""
        for step, seconds in self._present.items():
            self._earlier.setdefault(step, {}).update(seconds)
        self._present = {}

    def keep(self, engines: Collection[str]) -> None:
        """Forget all engines but these."""
        for measured in (self._earlier, self._present):
            for step, seconds in measured.items():
                measured[step] = {name: s for name, s in seconds.items() if name in engines}

    def has_others(self, engine: str) -> bool:
        """Return True if another engine has taken part in an update."""
        return any(seconds.keys() - {engine} for seconds in self._earlier.values())

    def passed(self, step: str, engine: str, seconds: float) -> None:
        """Note that an engine has passed a step; of several buckets the slowest one counts."""
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
        """Seconds after which an engine is late in a step; None: there is nobody to judge it by.

        Parameters
        ----------
        step
            Name of the step.
        engine
            The engine, which has not passed it.
        passed
            Seconds of the engines that have passed it now.
        suspects
            Engines that have not, of which `engine` is one, without those that wait for another
            engine of them. If they are more than those that have passed, the cause is not theirs.
        connecting
            True if the engine's communicator is being made.

        """
        if passed or len(suspects) > 1:
            others = list(passed.values()) if len(passed) >= len(suspects) else []
        else:  # it is alone in this update, or all others wait for it: their last update counts
            earlier = self._earlier.get(step, {})
            others = [seconds for name, seconds in earlier.items() if name != engine]
        if not others:
            return None
        return max(self.floor * (CONNECTING if connecting else 1.0), FACTOR * max(others))
