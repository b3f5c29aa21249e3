"""Draw how the runs learn: python -m tests.learning.figure RUNS docs/results/learning.png.

RUNS is the directory that `make test-learning` filled. Left: reward of the training samples, a mean
over five steps (of runs that have rewards); right: held-out prompts, by exact match. Both over
training steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from sluice.telemetry import run_directory
from sluice.telemetry.summary import evaluation_means
from tests.learning.algorithms import RUNS

WINDOW = 5


def draw(runs: Path, target: Path) -> list[str]:
    """Write the figure; the names of the runs that are in it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (training, held_out) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    shown: list[str] = []
    for name in RUNS:
        steps = run_directory.by_step(runs / name / run_directory.METRICS)
        if not steps:
            continue
        color = f"C{len(shown)}"
        rewards = [
            record["rollout/raw_reward"]
            for record in steps.values()
            if "rollout/raw_reward" in record
        ]
        smooth = [fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
        training.plot(list(steps)[: len(smooth)], smooth, color=color)
        held_out.plot(
            *zip(*evaluation_means(runs / name), strict=True), marker=".", label=name, color=color
        )
        shown.append(name)
    for axes, title in (
        (training, "reward of the training samples"),
        (held_out, "held-out prompts, exact match"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("training step")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    held_out.legend(frameon=False, fontsize=8, loc="lower right")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    return shown


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    names = draw(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{sys.argv[2]}: {', '.join(names) or 'no runs found'}")
