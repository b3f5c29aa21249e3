"""Parts of a quickstart step's time, beside what the bare engine and the bare trainer need for the
same work.

    python benchmarks/step.py [--steps 60] [--out docs/results/step.md]

Runs the quickstart in synchronous mode. Then serves the model that it trained with the same SGLang
command and sends the same number of requests straight to it: that is the limit of generation. The
limit of training is what the trainer spends in forward, backward and optimizer. What is left over
is sluice: leases, rewards, storage, weights, commits.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.processes import small_engine
from sluice.engines.sglang.client import Client
from sluice.runtime.pod_env import free_port
from sluice.telemetry import run_directory

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart"
WARM_UP = 10
PHASES = {
    "waiting for samples": "perf/train_wait_time",
    "reading the batch": "perf/data_preprocess_time",
    "training": "perf/actor_train_time",
    "weights to the engine": "perf/update_weights_time",
}
SAMPLING = {"temperature": 1.0, "max_new_tokens": 4}


def quickstart(directory: Path, steps: int) -> tuple[list[dict[str, float]], float]:
    """Metrics of each step after the warm-up, and seconds from the start to the first trained
    step.
    """
    subprocess.run([sys.executable, str(QUICKSTART / "make_data.py"), str(QUICKSTART)], check=True)
    command = [
        sys.executable,
        "-m",
        "sluice_cli",
        "run",
        str(QUICKSTART / "job.yaml"),
        "--plain",
        "--run-dir",
        str(directory),
    ]
    command += [
        "--set",
        f"trainer.steps={steps}",
        "--set",
        "evaluation=null",
        "--set",
        f"checkpoint.everySteps={steps}",
    ]
    started = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    metrics = list(run_directory.by_step(directory / run_directory.METRICS).values())
    return metrics[WARM_UP:], metrics[0]["time"] - started


async def bare_generation(model: Path, repeats: int) -> list[float]:
    """Seconds that the engine alone needs for the requests of a step: 32 prompts x 8, 128 at a
    time."""
    port = free_port()
    server = small_engine(model, port)
    names = itertools.count()
    try:
        async with Client(f"http://127.0.0.1:{port}") as engine:
            await server.ready(engine, 180)
            slots = asyncio.Semaphore(128)

            async def generate(prompt: int) -> None:
                async with slots:
                    ids = [14, 3 + prompt % 10, 3 + prompt // 10 % 10, 3 + prompt % 7, 13]
                    await engine.generate(f"bench-{next(names)}", ids, SAMPLING)

            seconds = []
            for _ in range(repeats + 2):
                started = time.perf_counter()
                await asyncio.gather(*(generate(prompt) for prompt in range(32) for _ in range(8)))
                seconds.append(time.perf_counter() - started)
            return seconds[2:]
    finally:
        server.terminate()
        server.wait(60)


def table(metrics: list[dict[str, float]], bare: list[float]) -> str:
    step = statistics.median(m["perf/step_time"] for m in metrics)
    rows = []
    for label, name in PHASES.items():
        median = statistics.median(m[name] for m in metrics)
        rows.append(f"| {label} | {median * 1e3:.0f} | {median / step:.0%} |")
    generation, training = (
        statistics.median(bare),
        statistics.median(m["perf/actor_train_time"] for m in metrics),
    )
    rows.append(f"| **step** | **{step * 1e3:.0f}** | 100% |")
    rows.append(
        f"| limit: bare SGLang for the same 256 requests | {generation * 1e3:.0f} | "
        f"{generation / step:.0%} |"
    )
    rows.append(
        f"| limit: bare generation + training | {(generation + training) * 1e3:.0f} | "
        f"{(generation + training) / step:.0%} |"
    )
    head = f"{len(metrics)} steps of 32 x 8 samples, synchronous; medians; {os.cpu_count()} cores, "
    head += (
        f"Python {platform.python_version()}\n\n| phase | ms | share of the step |\n|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "run"
        metrics, first = quickstart(directory, arguments.steps)
        bare = asyncio.run(bare_generation(directory / "checkpoints/hf", repeats=15))
        whole = json.loads((directory / "summary.json").read_text())["wall_seconds"]
        text = table(metrics, bare)
        text += (
            f"\n{first:.0f} s from the start to the first trained step (everything starts side by "
            "side; SGLang is the "
        )
        text += f"slowest), {whole:.0f} s for the whole run.\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
