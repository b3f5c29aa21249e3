"""Goodput: the share of a job's device time that trained or generated what was trained on.

    trained, generated   work that ended in a trained batch
    thrown_away          steps trained again, and groups that were filtered, failed or outdated
    waited               trainer without samples, engines without work
    synchronised         weight updates, and turns of shared GPUs
    saved                checkpoints and exports
    started, restarted   until the first attempt works; later attempts, and the time between

Goodput is (trained + generated) / total. On CPUs a pod counts as one device.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

_CATEGORIES = {
    "trainer/training": "trained",
    "trainer/waiting": "waited",
    "trainer/evaluating": "waited",
    "trainer/publishing": "synchronised",
    "trainer/taking_turn": "synchronised",
    "trainer/saving": "saved",
    "trainer/exporting": "saved",
    "rollout/generating": "generated",
    "rollout/tail": "generated",
    "rollout/idle": "waited",
    "rollout/unresponsive": "waited",
    "rollout/draining": "waited",
    "rollout/synchronising": "synchronised",
}
# On shared GPUs the trainer waits while the engines generate.
_COLOCATED = {"trainer/waiting": "generated", "trainer/evaluating": "generated"}
_LIFE = {"starting": "started", "restarting": "restarted"}
CATEGORIES = (
    "trained",
    "generated",
    "thrown_away",
    "waited",
    "synchronised",
    "saved",
    "started",
    "restarted",
)
# Part of `generated` in which engines had only the last few responses of a batch.
IN_TAILS = "generated_in_tails"


@dataclass(frozen=True, slots=True)
class Goodput:
    """Device seconds by category.

    Attributes
    ----------
    seconds
        Device seconds by category; a category without time may be missing.
    tail
        Share of `generated` in which engines had only the last few responses of a batch.

    """

    seconds: Mapping[str, float]
    tail: float = 0.0

    @classmethod
    def from_counters(
        cls,
        device_seconds: Mapping[str, float],
        counters: Mapping[str, int],
        step: int,
        *,
        colocated: bool,
    ) -> Goodput:
        """Compute goodput from the services' counters.

        Parameters
        ----------
        device_seconds
            Seconds by `role/state`, from the rendezvous.
        counters
            Counters of the buffer.
        step
            Steps committed.
        colocated
            True if engines share the trainer's GPUs.

        """
        names = _CATEGORIES | (_COLOCATED if colocated else {})
        seconds: defaultdict[str, float] = defaultdict(float)
        for key, value in device_seconds.items():
            state = key.partition("/")[2]
            seconds[names.get(key) or _LIFE.get(state, "waited")] += value
        redone = counters.get("steps_redone", 0)
        for category, wasted in (
            ("trained", redone / max(step + redone, 1)),
            ("generated", _wasted_groups(counters)),
        ):
            seconds["thrown_away"] += seconds[category] * wasted
            seconds[category] *= 1 - wasted
        return cls(
            {category: seconds[category] for category in CATEGORIES}, tail_of(device_seconds)
        )

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """Fraction in [0, 1]; 0 before the first device has worked."""
        useful = self.seconds.get("trained", 0.0) + self.seconds.get("generated", 0.0)
        return useful / self.total if self.total else 0.0

    def parts(self) -> dict[str, float]:
        """Seconds by category, with `generated` split into tails (IN_TAILS) and the rest."""
        parts = dict(self.seconds)
        if self.tail and "generated" in parts:
            whole = parts.pop("generated")
            parts |= {"generated": whole * (1 - self.tail), IN_TAILS: whole * self.tail}
        return parts

    def text(self) -> str:
        """Return text such as `61% (12.3 device hours: 31% trained, 30% generated, ...)`."""
        parts = sorted(self.parts().items(), key=operator.itemgetter(1), reverse=True)
        shares = [
            f"{value / self.total:.0%} {name.replace('_', ' ')}"
            for name, value in parts
            if self.total and value / self.total >= 0.005
        ]
        return f"{self.ratio:.0%} ({self.total / 3600:.3g} device hours: {', '.join(shares)})"


def tail_of(device_seconds: Mapping[str, float]) -> float:
    """Return the tails' share of generation time. `device_seconds` has keys `role/state`."""
    tail = device_seconds.get("rollout/tail", 0.0)
    return tail / (tail + device_seconds.get("rollout/generating", 0.0)) if tail else 0.0


def _wasted_groups(counters: Mapping[str, int]) -> float:
    """Return the share of finished groups that were not trained on."""
    wasted = sum(counters.get(f"groups_{name}", 0) for name in ("filtered", "failed", "outdated"))
    return wasted / max(wasted + counters.get("groups_trained", 0), 1)


class DeviceSeconds:
    """Device seconds of a job, summed over processes of the rendezvous that count from 0.

    Parameters
    ----------
    earlier
        Seconds of processes that have ended.
    latest
        Seconds of the process that answers now.

    """

    def __init__(
        self,
        earlier: Mapping[str, float] | None = None,
        latest: Mapping[str, float] | None = None,
    ) -> None:
        self.earlier = dict(earlier or {})
        self._latest = dict(latest or {})

    @classmethod
    def recalled(cls, total: Mapping[str, float], earlier: Mapping[str, float]) -> DeviceSeconds:
        """Restore the sum from a saved total and its saved earlier part."""
        latest = {key: value - earlier.get(key, 0.0) for key, value in total.items()}
        return cls(earlier, latest)

    def add(self, latest: Mapping[str, float]) -> None:
        """Take in an answer of the rendezvous.

        A smaller sum than the last comes from a new process.
        """
        if sum(latest.values()) < sum(self._latest.values()):
            self.earlier = self.total()
        self._latest = dict(latest)

    def total(self) -> dict[str, float]:
        keys = self.earlier.keys() | self._latest.keys()
        return {k: self.earlier.get(k, 0.0) + self._latest.get(k, 0.0) for k in sorted(keys)}
