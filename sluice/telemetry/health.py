"""Does a run look sick? From its metrics, in words, with what to try. Pure; each finding is meant
to be shown once.

The bounds are loose on purpose: a warning should be worth stopping for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sluice.telemetry import health_learning, health_speed
from sluice.telemetry.health_records import Record

WINDOW = 20
"""Steps that a look back takes into account."""
_FRUITLESS_BATCHES = 4


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """kind: one for each sort of trouble. text: what is seen, and what to try."""

    kind: str
    step: int
    text: str


class Watch:
    """Follows a run step by step, and tells of each kind of trouble once."""

    def __init__(self, earlier: Iterable[Record] = ()) -> None:
        """earlier: steps that were told of before."""
        self._history: deque[Record] = deque(maxlen=WINDOW)
        self._told: set[str] = set()
        for record in earlier:
            self.see(record)

    def see(self, record: Record) -> list[HealthFinding]:
        """Faults that this step shows and that were not told before."""
        self._history.append(record)
        fresh = [finding for finding in look(self._history) if finding.kind not in self._told]
        self._told |= {finding.kind for finding in fresh}
        return fresh


class Harvest:
    """Between two steps: tells once that groups come to nothing, so that no step is made of them.

    The buffer starts another group for each that fails or is filtered,
    so such a run would go on in silence.
    """

    def __init__(self, batch_size: int) -> None:
        self._bound = _FRUITLESS_BATCHES * batch_size
        self._step, self._failed, self._filtered = -1, 0, 0
        self._told = False

    def see(self, step: int, failed: int, filtered: int) -> HealthFinding | None:
        """step: the last that was made; failed, filtered: groups so far."""
        if step != self._step:
            self._step, self._failed, self._filtered = step, failed, filtered
        failed, filtered = failed - self._failed, filtered - self._filtered
        if self._told or failed + filtered < self._bound:
            return None
        self._told = True
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
        return HealthFinding(
            "fruitless", step, f"{' and '.join(parts)} without a step: {'; '.join(advice)}"
        )


def findings(records: Iterable[Record]) -> list[HealthFinding]:
    """Faults of a run, each kind where it was first seen. records: of its steps, in their order."""
    watch = Watch()
    return [finding for record in records for finding in watch.see(record)]


def look(history: Sequence[Record]) -> Iterator[HealthFinding]:
    """Faults at the newest of the last WINDOW steps."""
    for kind, rule in (health_learning.RULES | health_speed.RULES).items():
        text = rule(history)
        if text:
            yield HealthFinding(kind, int(history[-1].get("step", 0)), text)
