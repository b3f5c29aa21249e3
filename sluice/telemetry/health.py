"""Warnings about a run that looks sick, from its metrics, with what to try. Pure.

The bounds are loose on purpose: a warning should be worth stopping for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sluice.telemetry import health_learning, health_speed
from sluice.telemetry.health_records import Record, Rule
from sluice.telemetry.run_warnings import RunWarning, ordered

# Steps that a rule looks back on.
WINDOW = 20
RULES: dict[str, Rule] = health_learning.RULES | health_speed.RULES
_FRUITLESS_BATCHES = 4


@dataclass(frozen=True, slots=True)
class _History:
    """Steps as a rule sees them while its warning holds.

    A rule may compare the newest steps with earlier ones. While its warning holds, the earlier ones
    are those from before the trouble: else a lasting trouble would become the usual state.
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
    """Follows a run step by step, and knows which warnings hold."""

    def __init__(self, earlier: Iterable[Record] = ()) -> None:
        """earlier: steps whose warnings are not news."""
        self._window: deque[Record] = deque(maxlen=WINDOW)
        self._histories: dict[str, _History] = {}
        self._warnings: dict[str, RunWarning] = {}
        for record in earlier:
            self.see(record)

    def see(self, record: Record) -> list[RunWarning]:
        """Take a step in. Returns the warnings of kinds that the run did not have before."""
        self._window.append(record)
        told = set(self._warnings)
        for kind, rule in RULES.items():
            self._apply(kind, rule, record)
        return [self._warnings[kind] for kind in RULES if kind in self._warnings.keys() - told]

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
    """Warns between two steps that groups come to nothing, so that no step is made of them.

    The buffer starts another group for each that fails or is filtered, so such a run would go on in
    silence.
    """

    def __init__(self, batch_size: int) -> None:
        self._bound = _FRUITLESS_BATCHES * batch_size
        self._step, self._failed, self._filtered = -1, 0, 0
        self.warning: RunWarning | None = None

    def see(self, step: int, failed: int, filtered: int) -> RunWarning | None:
        """Compare with the counts at the last step. Returns the warning when it is news.

        step: the last that was made; failed, filtered: groups so far.
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
                "every sample of theirs failed, and the rollout log says why (sluice logs NAME "
                "rollout)"
            )
        if filtered:
            parts.append(f"{filtered} groups were filtered")
            advice.append(
                "rollout.dynamicFilter keeps too few: easier or harder prompts, more "
                "samplesPerPrompt"
            )
        text = f"{' and '.join(parts)} without a step: {'; '.join(advice)}"
        self.warning = RunWarning("fruitless", text)
        return self.warning


def warnings(records: Iterable[Record]) -> list[RunWarning]:
    """Warnings of a run, active ones first. records: of its steps, in their order."""
    return HealthMonitor(records).warnings()
