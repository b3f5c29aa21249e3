"""What an adapter learns beside full training, in equal steps from the same base model.

    python benchmarks/lora_learning.py [--steps 30] [--seeds 3] [--lr 1e-3]

The task is the quickstart's. Twenty steps of it make the base model. Every row is `sluice run` of
examples/lora from that base, once for each seed of the data's order: with all weights, and with
adapters at ten times the learning rate.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.processes import sluice_run
from sluice.telemetry import run_directory, summary

EXAMPLES = Path(__file__).parents[1] / "examples"
BASE_STEPS = 20
LAST = 5
RATIO = 10  # learning rate of an adapter to that of all weights
REWARD = "rollout/raw_reward"
# Learning rate of a row as a multiple of --lr, and `trainer.lora`.
ROWS: dict[str, tuple[float, str]] = {
    "all weights": (1, "null"),
    "adapters of rank 8": (RATIO, "{rank: 8, alpha: 32}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3, help="of all weights")
    parser.add_argument("--seconds", type=float, default=1800, help="longest duration of a run")
    options = parser.parse_args()
    quickstart = EXAMPLES / "quickstart"
    subprocess.run([sys.executable, quickstart / "make_data.py", quickstart], check=True)
    with tempfile.TemporaryDirectory() as parent:
        base = Path(parent) / "base"
        run(quickstart / "job.yaml", base, [f"trainer.steps={BASE_STEPS}"], options.seconds)
        print(f"| trained | lr | reward, last {LAST} of {options.steps} steps | held-out |")
        print("|---|---|---|---|", flush=True)
        for name, (ratio, lora) in ROWS.items():
            rate = options.lr * ratio
            runs: list[tuple[float, float]] = []
            for seed in range(options.seeds):
                settings = (
                    f"model.path={base}/checkpoints/hf",
                    f"trainer.steps={options.steps}",
                    f"data.seed={seed}",
                    f"trainer.optimizer.lr={rate}",
                    f"trainer.optimizer.minLr={rate / 10}",
                    f"evaluation.everySteps={options.steps}",
                    "checkpoint.exportHF=false",
                    f"trainer.lora={lora}",
                )
                directory = Path(parent) / f"{name.replace(' ', '-')}-{seed}"
                manifest = EXAMPLES / "lora/job.yaml"
                runs.append(run(manifest, directory, settings, options.seconds))
            rewards, held_out = zip(*runs, strict=True)
            print(f"| {name} | {rate:g} | {spread(rewards)} | {spread(held_out)} |", flush=True)


def run(
    manifest: Path, directory: Path, overrides: Sequence[str], seconds: float
) -> tuple[float, float]:
    """Run a job; return the reward of its last steps, and that of held-out prompts at the end."""
    code, output = sluice_run(manifest, directory, overrides, seconds)
    if code:
        sys.exit(output[-3000:])
    steps = list(run_directory.by_step(directory / run_directory.METRICS).values())
    reward = statistics.fmean(step[REWARD] for step in steps[-LAST:])
    return reward, summary.evaluation_means(directory)[-1][1]


def spread(values: Sequence[float]) -> str:
    """Return the mean of the seeds and, in brackets, the smallest and the largest value."""
    return f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
