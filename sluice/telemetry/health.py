"""Warnings about an unhealthy run, from its step records, with what to try. Pure functions.

The bounds are loose on purpose: a warning should be worth stopping for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sluice.telemetry import health_learning, health_speed
from sluice.telemetry.health_records import Record, Rule
from sluice.telemetry.run_warnings import RunWarning, ordered

# Number of past steps that a rule reads.
WINDOW = 20
RULES: dict[str, Rule] = health_learning.RULES | health_speed.RULES
_FRUITLESS_BATCHES = 4


@dataclass(frozen=True, slots=True)
class _History:
    """Steps that a rule reads while its warning holds.

    A rule may compare the newest steps with earlier ones. While its warning holds, the earlier
    steps are those from before the problem. Otherwise a lasting problem would become the normal
    state.
    """

    before: list[Record]
    newest: deque[Record]

    @classmethod
    def split(cls, window: list[Record]) -> _History:
        half = len(window) // 2
        return cls(window[:half], deque(window[half:], maxlen=WINDOW // 2))

    def records(self) -> list[Record]:
        return [*self.before, *self.newest]


class HealthMonitor:
    """Follows a run step by step and keeps its warnings.

    Parameters
    ----------
    earlier
        Records of steps before this process; their warnings are not reported as new.

    """

    def __init__(self, earlier: Iterable[Record] = ()) -> None:
        self._window: deque[Record] = deque(maxlen=WINDOW)
        self._histories: dict[str, _History] = {}
        self._warnings: dict[str, RunWarning] = {}
        for record in earlier:
            self.see(record)

    def see(self, record: Record) -> list[RunWarning]:
        """Add a step. Returns warnings of kinds that the run has not had before."""
        self._window.append(record)
        earlier = set(self._warnings)
        for kind, rule in RULES.items():
            self._apply(kind, rule, record)
        return [self._warnings[kind] for kind in RULES if kind in self._warnings.keys() - earlier]

    def warnings(self) -> list[RunWarning]:
        """All warnings of the run so far, active ones first."""
        return ordered(self._warnings.values())

    def _apply(self, kind: str, rule: Rule, record: Record) -> None:
        history, earlier = self._histories.get(kind), self._warnings.get(kind)
        if history is None:
            history = _History.split(list(self._window))
        else:
            history.newest.append(record)
        text = rule(history.records())
        if text is None:
            self._histories.pop(kind, None)
            if earlier is not None:
                self._warnings[kind] = replace(earlier, active=False)
            return
        step = int(record.get("step", 0))
        first = step if earlier is None else earlier.first_step
        self._histories[kind] = history
        self._warnings[kind] = RunWarning(kind, text, first_step=first, last_step=step)


class StallMonitor:
    """Warns, between two steps, if groups are finished but no step is made of them.

    The buffer starts another group for each one that fails or is filtered, so such a run would go
    on without a sign.
    """

    def __init__(self, batch_size: int) -> None:
        self._bound = _FRUITLESS_BATCHES * batch_size
        self._step, self._failed, self._filtered = -1, 0, 0
        self.warning: RunWarning | None = None

    def see(self, step: int, failed: int, filtered: int) -> RunWarning | None:
        """Compare the counts with those at the last step. Returns the warning if it is new.

        Parameters
        ----------
        step
            Last committed step.
        failed, filtered
            Groups since the job began.

        """
        if step != self._step:
            self._step, self._failed, self._filtered = step, failed, filtered
            if self.warning is not None:
                self.warning = replace(self.warning, active=False)
        failed, filtered = failed - self._failed, filtered - self._filtered
        if self.warning is not None or failed + filtered < self._bound:
            return None
        parts, advice = list[str](), list[str]()
        if failed:
            parts.append(f"{failed} groups failed")
            advice.append(
                "all of their samples failed, and the rollout log says why (sluice logs NAME "
                "rollout)"
            )
        if filtered:
            parts.append(f"{filtered} groups were filtered")
            advice.append(
                "rollout.dynamicFilter keeps too few: try easier or harder prompts, or more "
                "samplesPerPrompt"
            )
        text = f"{' and '.join(parts)} without a step: {'; '.join(advice)}"
        self.warning = RunWarning("fruitless", text)
        return self.warning


def warnings(records: Iterable[Record]) -> list[RunWarning]:
    """Warnings of a run, active ones first, from its step records in order."""
    return HealthMonitor(records).warnings()
