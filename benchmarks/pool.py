"""What a pool saves: LoRA jobs on the engine of a pool, beside a job with an engine of its own.

    python benchmarks/pool.py [--jobs 8] [--steps 10] [--json FILE]

All jobs are equal: synchronous GRPO on the prompts of the throughput example with a model of
SmolLM2-135M's shape (random weights), adapters of rank 32. `apart` is one job with its own engine
and trainer, a GPU each; eight such jobs are eight times this. `pool` is all jobs at the same time
with one engine on the first GPU and all trainers on the second one. On a machine with one GPU the
engine and all trainers share it in both ways, and weights go by gloo: NCCL connects no two
processes on one GPU. A rate counts the tokens of the
responses that were trained on from the time at which the last job has made two steps, until each
job has made `--steps` more; then all are stopped. On a machine without GPUs both share its cores,
and a tiny model is the rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML

from benchmarks.shapes import write_config

GPUS = torch.cuda.device_count()
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "throughput"
SKIPPED = 2
STAGES = {
    "step": "perf/step_time",
    "waits for responses": "perf/train_wait_time",
    "trains": "perf/actor_train_time",
    "sends weights": "perf/update_weights_time",
}
NAME = "benchmark"
SECONDS = 420.0
ENGINE_GPU = "0"
TRAINER_GPU = "1" if GPUS > 1 else "0"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=8 if GPUS else 2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="more of both servers', as JSON"
    )
    parser.add_argument("--json", type=Path, help="file of the result")
    parser.add_argument("--directory", type=Path, help="keep model, runs and logs here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        directory = options.directory or Path(text)
        directory.mkdir(exist_ok=True)
        os.environ["XDG_STATE_HOME"] = str(directory / "state")
        make_inputs(directory, options.engine_args)
        visible = f"{ENGINE_GPU},{TRAINER_GPU}"
        alone = run_jobs(directory, "apart", 1, options.steps, gpus=visible)
        apart = rate(alone)
        print(f"apart: {apart:,.0f} tokens/s", flush=True)
        with_pool = start_pool(directory)
        print("the pool's engine is ready", flush=True)
        try:
            together = run_jobs(directory, "pool", options.jobs, options.steps, gpus=TRAINER_GPU)
            shared = rate(together)
        finally:
            with_pool.send_signal(signal.SIGINT)
            with_pool.wait(60)
    machine = torch.cuda.get_device_name() if GPUS else platform.machine()
    gpus = 2 if GPUS > 1 else 1
    print(f"{options.jobs} jobs, {options.steps} steps each, {gpus} x {machine}")
    print("| | jobs | GPUs | tokens/s of all | tokens per GPU second |\n|---|---|---|---|---|")
    print(f"| apart | 1 | {gpus} | {apart:,.0f} | {apart / gpus:,.0f} |")
    print(f"| pool | {options.jobs} | {gpus} | {shared:,.0f} | {shared / gpus:,.0f} |")
    print(f"pool / apart: {shared / apart:.2f} times the tokens per GPU second")
    stages = {"apart": stage_seconds(alone), "pool": stage_seconds(together)}
    print(f"| median of a job's steps | {' | '.join(STAGES)} |\n|{'---|' * (len(STAGES) + 1)}")
    for way, seconds in stages.items():
        print(f"| {way} | {' | '.join(f'{second:.2f} s' for second in seconds.values())} |")
    if options.json:
        result = vars(options) | {"apart": apart, "pool": shared, "machine": machine}
        result["stages"] = stages
        options.json.write_text(json.dumps(result, default=str, indent=2) + "\n")


def make_inputs(directory: Path, engine_args: dict[str, Any]) -> None:
    """Write the model with random weights, the prompts, and the manifests of job and pool."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arguments = [] if GPUS else ["--tiny"]
    script = EXAMPLE / "make_data.py"
    subprocess.run([sys.executable, str(script), str(directory), *arguments], check=True)
    model = directory / "model"
    if GPUS:
        write_config(model, "smollm2-135m", "bfloat16", vocab_size=16)
    config = AutoConfig.from_pretrained(model)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    job = YAML(typ="safe").load(EXAMPLE / "job.yaml")
    spec: dict[str, Any] = job["spec"]
    spec["model"] = {"path": "model"}
    spec["reward"] = {"function": f"{EXAMPLE / 'reward.py'}:share"}
    spec["rollout"] |= {"replicas": 1, "gpusPerReplica": min(GPUS, 1), "batchSize": 16}
    memory = {"memFractionStatic": 0.7 if GPUS > 1 else 0.3} if GPUS else {}
    spec["rollout"]["engineArgs"] = memory | engine_args
    if not GPUS:
        spec["rollout"] |= {"samplesPerPrompt": 4, "sampling": {"maxResponseTokens": 32}}
    spec["trainer"] |= {"backend": "fsdp", "gpusPerNode": min(GPUS, 1), "lora": {"rank": 32}}
    spec["weightSync"] = {"lora": "adapter", "pauseMode": "versions"}
    if GPUS == 1:
        spec["weightSync"]["transport"] = "gloo"
        spec["trainer"]["maxTokensPerGpu"] = 8192  # all trainers have room
    spec["checkpoint"] = {"everySteps": 1000}
    del spec["evaluation"]
    (directory / "job.yaml").write_text(json.dumps(job))
    pool = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "RLEnginePool",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"path": "model"},
            "gpusPerReplica": min(GPUS, 1),
            "engineArgs": memory | engine_args,
        },
    }
    (directory / "pool.yaml").write_text(json.dumps(pool))


def start_pool(directory: Path) -> subprocess.Popen[bytes]:
    """Start the pool on the first GPU and wait until its engine answers."""
    log = directory / "pool.log"
    command = [sys.executable, "-m", "sluice_cli", "pool", "up", str(directory / "pool.yaml")]
    variables = os.environ | ({"CUDA_VISIBLE_DEVICES": ENGINE_GPU} if GPUS else {})
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
    end = time.monotonic() + SECONDS
    while "is ready" not in log.read_text():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise SystemExit(f"error: the pool does not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.5)
    return process


def run_jobs(
    directory: Path, way: str, jobs: int, steps: int, *, gpus: str
) -> list[list[dict[str, Any]]]:
    """Run jobs until all have made so many steps at the same time; return each one's metrics."""
    variables = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus} if GPUS else {})
    processes = []
    for number in range(jobs):
        run = directory / f"{way}-{number}"
        settings = ["trainer.steps=100000", f"metadata.name=job-{number}"]
        if way == "pool":
            settings += [f"rollout.pool={NAME}", "rollout.engineArgs={}"]
        command = [sys.executable, "-m", "sluice_cli", "run", str(directory / "job.yaml")]
        command += ["--plain", "--run-dir", str(run)]
        command += [word for setting in settings for word in ("--set", setting)]
        with (directory / f"{way}-{number}.log").open("wb") as output:
            processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=output))
    files = [directory / f"{way}-{number}" / "metrics.jsonl" for number in range(jobs)]
    end = time.monotonic() + SECONDS
    try:
        while not all(count >= steps for count in steps_together(list(map(read, files)))):
            for number, process in enumerate(processes):
                if process.poll() is not None or time.monotonic() > end:
                    text = (directory / f"{way}-{number}.log").read_text()
                    made = [len(read(file)) for file in files]
                    raise SystemExit(
                        f"error: job {number} of {way} ended with {process.returncode}, or the "
                        f"time did: {made} steps\n{text[-3000:]}"
                    )
            time.sleep(1)
        return list(map(read, files))
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
        for process in processes:
            process.wait(120)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the steps of a job but the first ones; none if it has not begun."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")][SKIPPED:]


def steps_together(jobs: Sequence[Sequence[dict[str, Any]]]) -> list[int]:
    """Return the number of steps of each job since all of them train."""
    if not all(jobs):
        return [0] * len(jobs)
    begin = max(steps[0]["time"] for steps in jobs)
    return [sum(step["time"] > begin for step in steps) for steps in jobs]


def rate(jobs: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Return the tokens a second of all jobs together while all of them train."""
    begin = max(steps[0]["time"] for steps in jobs)
    end = min(steps[-1]["time"] for steps in jobs)
    tokens = sum(
        step["rollout/tokens"] for steps in jobs for step in steps if begin < step["time"] <= end
    )
    return float(tokens / (end - begin))


def stage_seconds(jobs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Return the median seconds of each stage over the steps of all jobs."""
    return {
        name: statistics.median(step.get(key, 0.0) for steps in jobs for step in steps)
        for name, key in STAGES.items()
    }


if __name__ == "__main__":
    main()
