"""Cost of old samples in learning, and gain of each correction for them, on the quickstart's task.

    python benchmarks/staleness.py [--lr 6e-3] [--steps 60] [--seeds 2]

Every row is `sluice run` of examples/quickstart at four times its learning rate, so that a step's
age matters, once for each seed of the data's order. `apart` are the log-probs of trainer and
engine, mean over the trained tokens; `same weights` is over those alone that the weights in
training have sampled, which are the last column's share of all. Synchronous is what to compare
with.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import sluice_run
from sluice.telemetry import run_directory

MANIFEST = Path(__file__).parents[1] / "examples/quickstart/job.yaml"
ASYNC = ("rollout.mode=async", "rollout.maxStaleness=1", "weightSync.pauseMode=retract")
ROWS: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "one step old, no correction": ASYNC,
    "the same, `pauseMode: in_place`": (*ASYNC[:2], "weightSync.pauseMode=in_place"),
    "`method: tis`": (*ASYNC, "algorithm.offPolicy.method=tis"),
    "`method: icepop`, low 0.5": (*ASYNC, "algorithm.offPolicy={method: icepop, low: 0.5}"),
    "`oldLogProbs: rollout`": (*ASYNC, "algorithm.offPolicy.oldLogProbs=rollout"),
}
APART = "train/train_rollout_logprob_abs_diff"
LAST = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    subprocess.run(
        [sys.executable, str(MANIFEST.parent / "make_data.py"), str(MANIFEST.parent)], check=True
    )
    print(
        f"| | reward, last {LAST} of {options.steps} steps | apart | same weights | of the tokens |"
    )
    print("|---|---|---|---|---|", flush=True)
    for name, overrides in ROWS.items():
        runs = [steps(options, seed, overrides) for seed in range(options.seeds)]
        rewards = " ".join(f"{mean(run[-LAST:], 'rollout/raw_reward'):.2f}" for run in runs)
        every = [record for run in runs for record in run]
        cells = (
            mean(every, APART),
            mean(every, f"{APART}_on_policy"),
            mean(every, "train/on_policy_ratio"),
        )
        print(
            f"| {name} | {rewards} | {cells[0]:.4f} | {cells[1]:.1e} | {cells[2]:.0%} |", flush=True
        )


def steps(options: argparse.Namespace, seed: int, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of every step of one run."""
    fixed = (
        f"trainer.steps={options.steps}",
        f"evaluation.everySteps={options.steps}",
        f"data.seed={seed}",
        f"trainer.optimizer.lr={options.lr}",
        f"trainer.optimizer.minLr={options.lr / 10}",
    )
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "run"
        code, output = sluice_run(MANIFEST, directory, (*fixed, *overrides), seconds=1200)
        if code:
            sys.exit(output[-3000:])
        return list(run_directory.by_step(directory / run_directory.METRICS).values())


def mean(records: Sequence[dict[str, Any]], name: str) -> float:
    """Of the steps that have this number: the difference has none where no token was sampled by the
    same weights."""
    values = [record[name] for record in records if name in record]
    return statistics.fmean(values) if values else float("nan")


if __name__ == "__main__":
    main()
