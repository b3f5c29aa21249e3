"""Accounting of prompt groups: every leased group is trained, filtered, failed or still open.

The balance is checked at the end of every run. The buffer counts each state by itself, so a group
that is in no state, or in two, shows up as a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sluice.telemetry.run_warnings import RunWarning


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Groups by outcome.

    Attributes
    ----------
    open
        Groups in work, or stored and not yet trained.
    twice
        Groups that were trained twice.
    reasons
        How often a group failed, by reason. The sum exceeds `failed` if groups of an evaluation
        failed, or if failed groups went back because the job was given up.
    stale
        Groups that were older than `rollout.maxStaleness` when they were trained.

    """

    leased: int
    trained: int
    filtered: int
    failed: int
    open: int
    twice: int
    reasons: Mapping[str, int]
    # Groups that were older than `rollout.maxStaleness` when they were trained.
    stale: int = 0

    @classmethod
    def from_counters(cls, counters: Mapping[str, int], reasons: Mapping[str, int]) -> GroupCounts:
        """Read `counters` and `failed` of the buffer's statistics."""

        def count(name: str) -> int:
            return int(counters.get(f"groups_{name}", 0))

        return cls(
            leased=count("leased"),
            trained=count("trained"),
            filtered=count("filtered"),
            failed=count("failed"),
            open=count("in_work") + count("stored"),
            twice=count("trained_twice"),
            reasons=dict(reasons),
            stale=int(counters.get("stale_groups", 0)),
        )

    @property
    def failures(self) -> int:
        """Number of failures, over all reasons."""
        return sum(self.reasons.values())

    @property
    def lost(self) -> int:
        """Groups without a state; negative if groups are in two states."""
        return self.leased - self.trained - self.filtered - self.failed - self.open

    def text(self) -> str:
        """Return text such as `320 groups leased = 300 trained + 8 filtered + 12 failed`."""
        agree = self.failures == self.failed
        failed = f"{self.failed} failed" + (
            f" ({self._by_reason()})" if self.failed and agree else ""
        )
        return (
            f"{self.leased} groups leased = {self.trained} trained + {self.filtered} filtered + "
            f"{failed} + {self.open} open"
        )

    def warnings(self, example: str = "") -> Iterator[RunWarning]:
        """Yield warnings about lost, failed and stale groups.

        `example` says why one group failed.
        """
        if self.lost or self.twice:
            yield RunWarning(
                "unbalanced groups",
                f"the groups do not add up: {self.text()}; {self.lost} groups are lost and "
                f"{self.twice} were trained twice. This is a bug in sluice: please report it with "
                "the buffer's log",
            )
        if self.failures or self.failed:
            yield RunWarning("failed groups", self._failures_text(example))
        if self.stale:
            yield RunWarning(
                "stale groups",
                f"{self.stale} of {self.trained} trained groups were older than "
                "rollout.maxStaleness: with rollout.partial or rollout.overSampling a batch "
                "consists of the groups that finish first, and the later ones are trained as well",
            )

    def _failures_text(self, example: str) -> str:
        untrained = f"{self.failed} of {self.leased} groups"
        share = f"({self.failed / max(self.leased, 1):.1%})"
        if self.failures <= self.failed:
            text = f"{untrained} {share} failed and were not trained"
        else:
            text = (
                f"groups failed {self.failures} times, and {untrained} {share} were not trained "
                "because of it: the others belonged to an evaluation or were tried again"
            )
        reasons = f": {self._by_reason()}" if self.reasons else ""
        such_as = f". For example, {example}" if example else ""
        return f"{text}{reasons}{such_as}. failures.jsonl in the run directory lists them"

    def _by_reason(self) -> str:
        most = sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in most)


@dataclass(frozen=True, slots=True)
class Totals:
    """The buffer's counters since the job began, and groups that failed for good, by reason."""

    counters: Mapping[str, int]
    failed: Mapping[str, int]

    @classmethod
    def from_counters(cls, counters: Mapping[str, float], failed: Mapping[str, int]) -> Totals:
        """Read `counters` and `failed` of the buffer's statistics."""
        return cls({name: int(value) for name, value in counters.items()}, dict(failed))

    def group_counts(self) -> GroupCounts:
        return GroupCounts.from_counters(self.counters, self.failed)

    def to_json(self) -> dict[str, dict[str, int]]:
        return {"counters": dict(self.counters), "failed": dict(self.failed)}

    @classmethod
    def latest(cls, *several: Totals | None) -> Totals:
        """Return the latest of several readings of one buffer; zeros without a reading.

        `groups_leased` only ever grows, so it orders the readings.
        """
        readings = (totals for totals in several if totals)
        return max(
            readings,
            key=lambda totals: totals.counters.get("groups_leased", 0),
            default=cls({}, {}),
        )
