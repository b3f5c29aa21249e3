"""How a batch was made: at which engines and how fast, how busy their workers were, and in how many
turns of the model.

Samples tell it in their metadata. A rank has only its own ones, and those of a group may lie on
several, so what all ranks have is put together before it is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles
from typing import Any

from sluice.samples.sample import ENGINE_LATENCY, WORKER, WORKER_BUSY, WORKER_TAIL, SampleGroup
from sluice.samples.turns import TURNS, turn_rewards

_OF_GROUPS = (WORKER, WORKER_BUSY, WORKER_TAIL, ENGINE_LATENCY)


@dataclass(slots=True)
class Provenance:
    """Facts that samples tell. groups: of each group whose first sample is here. lengths: tokens of
    each sequence. turns, branches: of each sample that a generate function has made, turns of the
    model and sequences.
    """

    groups: list[Mapping[str, Any]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)

    @classmethod
    def of_groups(cls, groups: Sequence[SampleGroup]) -> Provenance:
        """Of one rank's samples."""
        samples = [sample for group in groups for sample in group.samples]
        told = ({n: s.metadata[n] for n in _OF_GROUPS if n in s.metadata} for s in samples)
        played = [sample for sample in samples if TURNS in sample.metadata]
        return cls(
            groups=[metadata for metadata in told if metadata],
            lengths=[len(sequence.tokens) for s in samples for sequence in s.sequences],
            turns=[sum(map(len, turn_rewards(sample).values())) for sample in played],
            branches=[len(sample.sequences) for sample in played],
        )

    @classmethod
    def merge(cls, parts: Iterable[Provenance]) -> Provenance:
        """Of the samples of several ranks."""
        whole = cls()
        for part in parts:
            whole.groups += part.groups
            whole.lengths += part.lengths
            whole.turns += part.turns
            whole.branches += part.branches
        return whole

    def metrics(self) -> dict[str, float]:
        """Metrics of a batch; those that its samples tell nothing of are left out."""
        busy, tails = (self._told(name) for name in (WORKER_BUSY, WORKER_TAIL))
        workers = self._told(WORKER)
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
            **_mean_and_max("multi_turn/turns", self.turns),
            **_mean_and_max("multi_turn/branches", self.branches),
        }

    def _told(self, name: str) -> list[Any]:
        return [group[name] for group in self.groups if name in group]


def engine_metrics(workers: Sequence[str]) -> dict[str, float]:
    """How many engines made groups, and the largest share of one. workers: of each group."""
    groups = Counter(workers)
    return {
        "rollout/engines": float(len(groups)),
        "rollout/engine_share/max": max(groups.values()) / len(workers),
    }


def latency_metrics(groups: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Seconds that engines take for a token of a response: the slowest, which one that is, and what
    three quarters of them exceed. An engine's are the median of its groups'. Nothing of one engine
    alone, which is neither slow nor fast.

    groups: of each its worker, and its seconds.
    """
    of_worker: dict[str, list[float]] = {}
    for worker, seconds in groups:
        of_worker.setdefault(worker, []).append(seconds)
    engines = {worker: median(seconds) for worker, seconds in of_worker.items()}
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
