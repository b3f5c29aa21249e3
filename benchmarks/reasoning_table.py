"""The table and the picture of benchmarks/reasoning.py, from what it keeps of runs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

from sluice.telemetry import run_directory
from sluice.telemetry.report.drawing import legend_above
from sluice.telemetry.summary import evaluation_means

# Files of a run directory that --out gets, under the run's name.
KEPT = (run_directory.METRICS, run_directory.EVALUATION, run_directory.SUMMARY)
EACH_ROW = 10
WARM_UP = 3

Steps = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Run:
    """Metrics of a run by step. held_out: (step, mean reward)."""

    steps: Steps
    held_out: list[tuple[int, float]]


def kept(out: Path, name: str, seed: int) -> Run:
    prefix = out / f"{name}-{seed}"
    steps = run_directory.by_step(Path(f"{prefix}-{run_directory.METRICS}"))
    with tempfile.TemporaryDirectory() as directory:
        evaluation = Path(f"{prefix}-{run_directory.EVALUATION}")
        if evaluation.exists():
            shutil.copy(evaluation, Path(directory) / run_directory.EVALUATION)
        return Run(steps, evaluation_means(Path(directory)))


COLUMNS = {
    "reward": "rollout/raw_reward",
    "tokens a response": "rollout/response_len/mean",
    "cut off": "rollout/truncated_ratio",
    "entropy": "train/entropy_loss",
    "trainer against engine": "train/train_rollout_logprob_abs_diff",
    "s a step": "perf/step_time",
    "tokens/s": "perf/tokens_per_second",
}


def report(name: str, runs: Sequence[Run]) -> str:
    """A table of the training steps in tens, and a line for the held-out prompts."""
    done = [run for run in runs if run.steps]
    if not done:
        return f"{name}: no run has done a step"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    head = (
        f"{name}: {len(done)} seed(s) at once on {device}, {time.strftime('%Y-%m-%d')}; "
        f"{', '.join(str(max(run.steps)) for run in done)} steps"
    )
    lines = [f"| steps | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for first in range(1, max(max(run.steps) for run in done) + 1, EACH_ROW):
        last = first + EACH_ROW - 1
        cells = (over_seeds(done, key, first, last) for key in COLUMNS.values())
        lines.append(f"| {first}-{last} | {' | '.join(cells)} |")
    held_out = [run.held_out for run in runs if run.held_out]
    for when, place in (("before", 0), ("after", -1)) if held_out else ():
        values = [evaluations[place] for evaluations in held_out]
        at = ", ".join(str(step) for step, _ in values)
        scores = spread([score for _, score in values], 3)
        lines.append(f"\nheld out {when} (step {at}): {scores}")
    return "\n".join([head, "", *lines])


def over_seeds(runs: Sequence[Run], key: str, first: int, last: int) -> str:
    """A metric's mean in these steps; of seconds and rates the median, without the first steps."""
    steady = WARM_UP if key.startswith("perf/") else 0
    middle = median if steady else fmean
    values = [
        [
            float(record[key])
            for step, record in run.steps.items()
            if max(first, steady + 1) <= step <= last and key in record
        ]
        for run in runs
    ]
    means = [float(middle(run_values)) for run_values in values if run_values]
    return spread(means, 0 if max(means, default=0.0) >= 10 else 3)


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation."""
    if not values:
        return ""
    deviation = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):,.{digits}f}{deviation}"


def draw(axes: Any, *, runs: Sequence[Run]) -> None:
    """Reward (a mean over ten steps) and held-out prompts, and the length beside them."""
    length = axes.twinx()
    for seed, run in enumerate(runs):
        label = (lambda text: text) if seed == 0 else (lambda text: None)
        for target, key, color, text in (
            (axes, COLUMNS["reward"], "C0", "reward"),
            (length, COLUMNS["tokens a response"], "C2", "tokens a response (right)"),
        ):
            points = [(step, figures[key]) for step, figures in run.steps.items() if key in figures]
            values = [value for _, value in points]
            smooth = [fmean(values[max(0, i - EACH_ROW + 1) : i + 1]) for i in range(len(values))]
            steps = [step for step, _ in points]
            target.plot(steps, smooth, color=color, alpha=0.7, label=label(text))
        if run.held_out:
            axes.plot(*zip(*run.held_out, strict=True), "C1.-", label=label("held out"))
    axes.set_xlabel("training step")
    axes.set_ylim(0, 1.02)
    length.set_ylim(bottom=0)
    handles = [*axes.get_legend_handles_labels()[0], *length.get_legend_handles_labels()[0]]
    legend_above(axes, handles)
