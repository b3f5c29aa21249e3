"""The tables of benchmarks/peers.py: curves with their spread over seeds, and seconds a step."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SLUICE, TRL, VERL = "sluice", "TRL", "verl"
WINDOW = 10
WARM_UP = 3
# Fewest steps of a run from which a time between two steps after the warm-up can be taken.
FEWEST_STEPS = WARM_UP + 2
# Degrees of freedom -> quantile of Student's t, 95 %, two-sided.
T95 = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228}
MOST_SEEDS = max(T95) // 2 + 1


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run, as all systems tell it. time: of its end, seconds; tokens: of a response,
    mean.
    """

    system: str
    seed: int
    step: int
    time: float
    reward: float
    entropy: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A number of two systems, a value for each seed."""

    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def difference(self) -> float:
        return statistics.fmean(self.ours) - statistics.fmean(self.theirs)

    @property
    def allowed(self) -> float:
        """The difference of the two means that the spread over seeds explains (t-test, 95 %)."""
        if not len(self.ours) == len(self.theirs) > 1:
            raise ValueError(
                f"{len(self.ours)} and {len(self.theirs)} seeds; expected as many of both, and at "
                "least two: one seed has no spread"
            )
        variances = statistics.variance(self.ours) + statistics.variance(self.theirs)
        return T95[2 * len(self.ours) - 2] * (variances / len(self.ours)) ** 0.5

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.allowed


Runs = dict[tuple[str, int], list[Step]]


def by_run(steps: Iterable[Step]) -> Runs:
    """(system, seed) -> its steps, in their order."""
    runs: Runs = {}
    for step in sorted(steps, key=lambda record: record.step):
        runs.setdefault((step.system, step.seed), []).append(step)
    return runs


def seeds_of(runs: Runs, peer: str) -> list[int]:
    """Seeds that sluice and a peer have both run."""
    both = (SLUICE, peer)
    return sorted({seed for _, seed in runs if all((name, seed) in runs for name in both)})


def with_peer(runs: Runs, peer: str) -> Runs:
    """The runs of sluice and of one peer."""
    return {run: steps for run, steps in runs.items() if run[0] in (SLUICE, peer)}


def compared(runs: Runs, peer: str, part: slice, field: str = "reward") -> Comparison:
    """The mean of a field over a part of the steps."""
    ours, theirs = (
        [
            statistics.fmean(getattr(step, field) for step in runs[name, seed][part])
            for seed in seeds_of(runs, peer)
        ]
        for name in (SLUICE, peer)
    )
    return Comparison(ours, theirs)


def rewards(runs: Runs, peer: str) -> str:
    """Reward after equal numbers of steps, with what it may differ by."""
    steps = min(map(len, runs.values()))
    parts = [slice(at, min(at + WINDOW, steps)) for at in range(0, steps, WINDOW)]
    rows = []
    for part in [*parts, slice(0, steps)]:
        reward, length = compared(runs, peer, part), compared(runs, peer, part, "tokens")
        cells = [
            f"{part.start + 1}-{part.stop}",
            *(spread(values) for values in (reward.ours, reward.theirs)),
            f"{reward.difference:+.3f}",
            f"{reward.allowed:.3f}",
            "yes" if reward.agrees else "**no**",
            *(f"{statistics.fmean(values):.2f}" for values in (length.ours, length.theirs)),
        ]
        rows.append(cells)
    head = ["steps", "reward, sluice", f"reward, {peer}", "differ by", "within", "agree"]
    return table([*head, "tokens, sluice", f"tokens, {peer}"], rows)


def first_entropies(runs: Runs, peer: str) -> str:
    """Entropy of the first step, at the initial weights: a check that they are the same."""
    first = compared(runs, peer, slice(0, 1), "entropy")
    ours, theirs = statistics.fmean(first.ours), statistics.fmean(first.theirs)
    return f"{ours:.4f} in sluice, {theirs:.4f} in {peer}"


def seconds(runs: Runs, peer: str) -> str:
    """Medians of the seconds from one step's end to the next one's."""
    rows = []
    for seed in seeds_of(runs, peer):
        ours, theirs = (median_seconds(runs[name, seed]) for name in (SLUICE, peer))
        rows.append([str(seed), f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"])
    return table(["seed", "s a step, sluice", f"s a step, {peer}", f"sluice / {peer}"], rows)


def median_seconds(steps: Sequence[Step]) -> float:
    return statistics.median(b.time - a.time for a, b in pairwise(steps[WARM_UP:]))


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
