"""Tokens per second of a training step with FSDP2, beside Megatron's of the same run.

    python benchmarks/backends.py [--shapes qwen3-0.6b qwen3-4b] [--gpus 1 2] [--tokens 16384]
        [--recompute full] [--out DIR]

Each line is one shape on so many GPUs: `benchmarks/trainer.py` with both backends, one after the
other, with random weights and the same batches. The goal is 70 % of Megatron. Without a GPU a tiny
model on one and two processes is the rehearsal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES

GPUS = torch.cuda.device_count()
GOAL = 0.7
BACKENDS = ("megatron", "fsdp")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = ["qwen3-0.6b", "qwen3-4b"] if GPUS else ["tiny"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes)
    processes = [n for n in (1, 2) if not GPUS or n <= GPUS]
    parser.add_argument("--gpus", nargs="+", type=int, default=processes)
    parser.add_argument("--tokens", type=int, default=16384 if GPUS else 256, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="of a rank and step")
    parser.add_argument("--lengths", choices=["equal", "lognormal"], default="lognormal")
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument("--seconds", type=float, default=280.0, help="limit of one measurement")
    parser.add_argument("--out", type=Path, help="directory of the results' JSON files")
    options = parser.parse_args()
    print(f"{'shape':<14}{'GPUs':>5}{'Megatron':>12}{'FSDP2':>12}{'ratio':>8}   loss of both")
    reached = True
    for shape in options.shapes:
        for gpus in options.gpus:
            results = [measured(backend, shape, gpus, options) for backend in BACKENDS]
            rates = [result.get("tokens_per_second", 0.0) for result in results]
            ratio = rates[1] / rates[0] if rates[0] else 0.0
            reached &= ratio >= GOAL
            losses = " ".join(f"{result.get('loss', float('nan')):.5f}" for result in results)
            print(
                f"{shape:<14}{gpus:>5}{rates[0]:>12,.0f}{rates[1]:>12,.0f}{ratio:>8.0%}   {losses}",
                flush=True,
            )
    print(f"goal of {GOAL:.0%} {'reached' if reached else 'missed'}; tokens per second, all GPUs")


def measured(backend: str, shape: str, gpus: int, options: argparse.Namespace) -> dict[str, Any]:
    """The result of a run of `trainer.py`; empty, with its last lines printed, where it failed."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(Path(__file__).with_name("trainer.py"))]
        command += ["--backend", backend, "--shape", shape, "--gpus", str(gpus)]
        command += ["--tokens", str(options.tokens), "--sequences", str(options.sequences)]
        command += ["--lengths", options.lengths, "--recompute", options.recompute]
        command += ["--out", directory]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
            said, failed = done.stdout + done.stderr, done.returncode != 0
        except subprocess.TimeoutExpired:
            said, failed = f"no end after {options.seconds:.0f} s", True
        files = list(Path(directory).glob("*.json"))
        if failed or not files:
            print(f"{backend}, {shape}, {gpus} GPUs failed:\n{said[-3000:]}", flush=True)
            return {}
        result: dict[str, Any] = json.loads(files[0].read_text())
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / files[0].name).write_text(files[0].read_text())
        return result


if __name__ == "__main__":
    main()
