"""A whole run of a manifest on this machine: its reward, its tokens for each GPU and second, where
a step's time goes.

    python benchmarks/end_to_end.py examples/throughput/job.yaml [--seconds 200] [--out DIR]
        [--set FIELD=VALUE ...]

It is `sluice run`. After --seconds it is stopped as by Ctrl-C, and what it has done by then counts.
Prints a row of docs/results/end-to-end.md, medians of the steps after the third. The limit beside
it: a synchronous step cannot be shorter than waiting for samples and training together, an
asynchronous one than the training; what is left over is weights, storage and commits.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import sluice_run
from sluice.api import RLJob, load_job
from sluice.telemetry import run_directory

WARM_UP = 3
SAME_WEIGHTS = "train/train_rollout_logprob_abs_diff_on_policy"
COLUMNS = (
    "manifest",
    "machine",
    "steps",
    "reward",
    "log-probs, trainer against engine",
    "of the same weights",
    "tokens/s a GPU",
    "step",
    "waiting",
    "training",
    "weights",
    "limit",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument(
        "--out",
        type=Path,
        help="directory that gets metrics.jsonl and the row, named by the manifest",
    )
    parser.add_argument("--name", help="of those files")
    options = parser.parse_args()
    job = load_job(options.manifest, options.set)
    make_data(options.manifest, job)
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "run"
        code, output = sluice_run(options.manifest, directory, options.set, options.seconds)
        records = run_directory.by_step(directory / run_directory.METRICS).values()
        metrics = [
            record for record in records if "perf/update_weights_time" in record
        ]  # not cut off in its middle
        if len(metrics) <= WARM_UP:
            sys.exit(
                f"{output[-3000:]}\n{len(metrics)} steps in {options.seconds:.0f} s are too few to "
                "say anything"
            )
        line = row(options.manifest, job, metrics)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            name = options.name or f"{options.manifest.parent.name}-{options.manifest.stem}"
            (options.out / f"{name}.jsonl").write_text(
                "".join(json.dumps(record) + "\n" for record in metrics)
            )
            (options.out / f"{name}.md").write_text(f"{HEAD}\n{line}\n")
    print(f"{HEAD}\n{line}\nended with {code}: {' | '.join(output.strip().splitlines()[-2:])}")


def make_data(manifest: Path, job: RLJob) -> None:
    """Run the example's script, which writes its data beside its prompts; no-op without one."""
    path = job.spec.data.prompts[0].path
    if path is None:
        return
    script = (manifest.parent / path).parent / "make_data.py"
    if script.exists():
        subprocess.run([sys.executable, str(script), str(script.parent)], check=True)


def row(manifest: Path, job: RLJob, metrics: list[dict[str, Any]]) -> str:
    steady = metrics[WARM_UP:]

    def median(name: str) -> float:
        return statistics.median(record[name] for record in steady)

    step, waiting, training = (
        median(f"perf/{name}_time") for name in ("step", "train_wait", "actor_train")
    )
    limit = training if job.spec.rollout.mode == "async" else waiting + training
    reward = [record["rollout/raw_reward"] for record in metrics]
    apart = median("train/train_rollout_logprob_abs_diff")
    worst = max(record["train/train_rollout_logprob_abs_diff_max"] for record in metrics)
    same = [record[SAME_WEIGHTS] for record in steady if SAME_WEIGHTS in record]
    rate = statistics.median(
        record["rollout/tokens"] / record["perf/step_time"] for record in steady
    )
    cells = [
        f"{manifest.parent.name}/{manifest.name}, {job.spec.rollout.mode}",
        machine(job),
        f"{len(metrics)} of {job.spec.trainer.steps}",
        f"{reward[0]:.3f} -> {reward[-1]:.2f}",
        f"{apart:.4f} mean, {worst:.3f} at most",
        f"{statistics.median(same):.4f} mean" if same else "no such tokens",
        f"{rate / max(gpus(job), 1):,.0f}",
        *(
            f"{seconds:.2f} s"
            for seconds in (step, waiting, training, median("perf/update_weights_time"))
        ),
        f"{limit:.2f} s, {limit / step:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def gpus(job: RLJob) -> int:
    trainer, rollout = job.spec.trainer, job.spec.rollout
    own = trainer.nodes * trainer.gpus_per_node
    return (
        own
        if trainer.colocate
        else own + (job.spec.replicas or 0) * rollout.gpus_per_replica * rollout.nodes_per_replica
    )


def machine(job: RLJob) -> str:
    what = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available() and gpus(job)
        else platform.machine() + " CPU"
    )
    return f"{gpus(job) or 1} x {what}, {time.strftime('%Y-%m-%d')}"


if __name__ == "__main__":
    main()
