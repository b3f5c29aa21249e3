"""The provenance of a batch: its engines and their speed, busy workers, and turns of the model.

The facts are in the metadata of samples. A rank has only its share of the samples, and a group may
be spread over several ranks, so the facts of all ranks are merged before they are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles
from typing import Any

from sluice.samples.sample import (
    ENGINE_LATENCY,
    SPECULATED_TOKENS,
    SPECULATIVE_PASSES,
    WORKER,
    WORKER_BUSY,
    WORKER_TAIL,
    SampleGroup,
)
from sluice.samples.turns import TURNS, turn_rewards

_GROUP_KEYS = (
    WORKER,
    WORKER_BUSY,
    WORKER_TAIL,
    ENGINE_LATENCY,
    SPECULATED_TOKENS,
    SPECULATIVE_PASSES,
)


@dataclass(slots=True)
class Provenance:
    """Facts about the samples of some ranks.

    Attributes
    ----------
    groups
        Metadata of each group whose first sample is among them.
    lengths
        Tokens of each sequence.
    turns, branches
        Turns of the model, and sequences, of each sample that a generate function made.

    """

    groups: list[Mapping[str, Any]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)

    @classmethod
    def of_groups(cls, groups: Sequence[SampleGroup]) -> Provenance:
        """Return the facts about one rank's samples."""
        samples = [sample for group in groups for sample in group.samples]
        recorded = ({n: s.metadata[n] for n in _GROUP_KEYS if n in s.metadata} for s in samples)
        played = [sample for sample in samples if TURNS in sample.metadata]
        return cls(
            groups=[metadata for metadata in recorded if metadata],
            lengths=[sequence.length for s in samples for sequence in s.sequences],
            turns=[sum(map(len, turn_rewards(sample).values())) for sample in played],
            branches=[len(sample.sequences) for sample in played],
        )

    @classmethod
    def merge(cls, parts: Iterable[Provenance]) -> Provenance:
        """Merge the facts of several ranks."""
        whole = cls()
        for part in parts:
            whole.groups += part.groups
            whole.lengths += part.lengths
            whole.turns += part.turns
            whole.branches += part.branches
        return whole

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a batch, without those that no sample has facts for."""
        busy, tails = (self._recorded(name) for name in (WORKER_BUSY, WORKER_TAIL))
        workers = self._recorded(WORKER)
        latencies = [
            (group[WORKER], group[ENGINE_LATENCY])
            for group in self.groups
            if WORKER in group and ENGINE_LATENCY in group
        ]
        return {
            **({"rollout/worker_busy": fmean(busy)} if busy else {}),
            **({"rollout/tail_time": max(tails)} if tails else {}),
            **(engine_metrics(workers) if workers else {}),
            **latency_metrics(latencies),
            **self._acceptance(),
            **_mean_and_max("multi_turn/turns", self.turns),
            **_mean_and_max("multi_turn/branches", self.branches),
        }

    def _acceptance(self) -> dict[str, float]:
        """Return the acceptance length: tokens of responses for each pass that verifies some."""
        passes = sum(self._recorded(SPECULATIVE_PASSES))
        tokens = sum(self._recorded(SPECULATED_TOKENS))
        return {"rollout/spec_accept_length": tokens / passes} if passes > 0 else {}

    def _recorded(self, name: str) -> list[Any]:
        return [group[name] for group in self.groups if name in group]


def engine_metrics(workers: Sequence[str]) -> dict[str, float]:
    """Return the number of engines and the largest share of one, from each group's worker."""
    groups = Counter(workers)
    return {
        "rollout/engines": float(len(groups)),
        "rollout/engine_share/max": max(groups.values()) / len(workers),
    }


def latency_metrics(groups: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds that engines take for a token of a response.

    The latency of an engine is the median over its groups. The metrics are the slowest engine, its
    latency, and the first quartile; empty with one engine, which is neither slow nor fast.

    Parameters
    ----------
    groups
        Worker and seconds of each group.

    """
    by_worker: dict[str, list[float]] = {}
    for worker, seconds in groups:
        by_worker.setdefault(worker, []).append(seconds)
    engines = {worker: median(seconds) for worker, seconds in by_worker.items()}
    if len(engines) < 2:
        return {}
    slowest = max(engines, key=lambda worker: engines[worker])
    return {
        "rollout/engine_latency/p25": quantiles(engines.values(), n=4, method="inclusive")[0],
        "rollout/engine_latency/max": engines[slowest],
        "rollout/slowest_engine": float(slowest.rpartition("-")[2]),
    }


def _mean_and_max(name: str, values: Sequence[int]) -> dict[str, float]:
    return {f"{name}/mean": fmean(values), f"{name}/max": float(max(values))} if values else {}
