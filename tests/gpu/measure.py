"""The measurements that need a machine of four or eight GPUs, one after another within a time.

    python tests/gpu/measure.py four [--limit-s 1400] [--only NAME ...] --out DIR
    python tests/gpu/measure.py eight --out DIR
    python tests/gpu/measure.py four --rehearse --out DIR     each with a tiny model, on a CPU

A measurement is a benchmark with its arguments, the number of its GPUs and the longest that it may
take. One that needs fewer GPUs than the machine has runs beside others. --out gets the output and
the result files of each; the last lines of all come at the end, for docs/results. What finds no
time, fails or takes too long is named there, and the others run all the same.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# As docs/engines.md has them for an SGLang without FlashInfer and FlashAttention 3.
KERNELS = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none "
    "--disable-piecewise-cuda-graph"
)
ENGINE = f'--engine-args="{KERNELS}"'
WEIGHTS = f"benchmarks/weight_sync.py --out $OUT {ENGINE}"


@dataclass(frozen=True)
class Measurement:
    """One command, and the same as a rehearsal; `$OUT` is the directory of the results."""

    name: str
    gpus: int
    seconds: float
    command: str
    rehearsal: str
    lines: int = 20


FOUR = (
    Measurement(
        "weights to three engines in a chain",
        4,
        240,
        f"{WEIGHTS} --shape qwen3-4b --engines 3 --fan-out direct,chain --buckets 512,1024",
        "benchmarks/weight_sync.py --engines 2 --fan-out chain --buckets 1 --updates 2",
    ),
    Measurement(
        "weights of a mixture, two ranks to an engine on two GPUs",
        4,
        240,
        f"{WEIGHTS} --shape qwen3-30b-a3b --sources 2 --expert 2 --engine-gpus 2 --buckets 1024",
        "benchmarks/weight_sync.py --shape tiny-moe --sources 2 --expert 2 --buckets 1 --updates 2",
    ),
    Measurement(
        "an adapter to three engines",
        4,
        200,
        f"{WEIGHTS} --shape qwen3-4b --engines 3 --lora-rank 32 --pause-mode versions --load 64 "
        "--buckets 1024",
        "benchmarks/weight_sync.py --lora-rank 4 --pause-mode versions --buckets 1 --updates 2",
    ),
    Measurement("faults", 4, 240, "tests/gpu/faults.py", "tests/gpu/faults.py --rehearse"),
    Measurement(
        "both backends on four GPUs",
        4,
        320,
        "benchmarks/backends.py --shapes qwen3-4b --gpus 4 --recompute full --out $OUT",
        "benchmarks/backends.py --gpus 2",
        6,
    ),
    Measurement(
        "pipeline of two stages",
        2,
        200,
        "tests/gpu/pipeline.py",
        "tests/gpu/pipeline.py --cpu",
    ),
    Measurement(
        "context parallel, 128k tokens",
        2,
        240,
        "benchmarks/trainer.py --shape qwen3-4b --gpus 2 --context 2 --tokens 131072 --sequences 1 "
        "--recompute full --steps 3 --warm-up 1 --out $OUT",
        "benchmarks/trainer.py --gpus 2 --context 2 --tokens 256 --steps 2 --warm-up 1",
        4,
    ),
)
EIGHT = (
    Measurement(
        "weights to seven engines in a chain",
        8,
        300,
        f"{WEIGHTS} --shape qwen3-4b --engines 7 --fan-out direct,chain --buckets 512,1024",
        "benchmarks/weight_sync.py --engines 3 --fan-out chain --buckets 1 --updates 2",
    ),
    Measurement(
        "weights of a mixture, four ranks to two engines on two GPUs each",
        8,
        300,
        f"{WEIGHTS} --shape qwen3-30b-a3b --sources 4 --expert 4 --engines 2 --engine-gpus 2 "
        "--buckets 1024",
        "benchmarks/weight_sync.py --shape tiny-moe --sources 2 --expert 2 --engines 2 --buckets 1 "
        "--updates 2",
    ),
    Measurement(
        "both backends on eight GPUs",
        8,
        320,
        "benchmarks/backends.py --shapes qwen3-4b --gpus 8 --recompute full --out $OUT",
        "benchmarks/backends.py --gpus 2",
        6,
    ),
    Measurement(
        "a whole run on eight GPUs",
        8,
        300,
        "benchmarks/end_to_end.py examples/gpu/eight-gpus.yaml --seconds 240 --out $OUT",
        "benchmarks/end_to_end.py examples/quickstart/job.yaml --seconds 60 --out $OUT "
        "--set trainer.steps=10",
        8,
    ),
)
MACHINES = {"four": FOUR, "eight": EIGHT}


@dataclass
class Running:
    measurement: Measurement
    process: subprocess.Popen[bytes]
    gpus: list[int]
    started: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("machine", choices=MACHINES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=1400.0)
    parser.add_argument("--only", nargs="+", help="beginnings of names")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    chosen = [
        measurement
        for measurement in MACHINES[options.machine]
        if not options.only or measurement.name.startswith(tuple(options.only))
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.rehearse:  # which end_to_end.py reads
        example = "examples/quickstart"
        command = [sys.executable, f"{example}/make_data.py", example]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    outcomes = run_all(chosen, options)
    for measurement in chosen:
        print(f"\n## {measurement.name}: {outcomes[measurement.name]}")
        if (log := log_of(options.out, measurement)).exists():
            text = log.read_text(errors="replace").splitlines()
            print("\n".join(text[-measurement.lines :]))
    return 0 if all(outcome.startswith("done") for outcome in outcomes.values()) else 1


def run_all(chosen: list[Measurement], options: argparse.Namespace) -> dict[str, str]:
    """Run measurements as GPUs get free; return how each ended."""
    number = {"four": 4, "eight": 8}[options.machine]
    free = list(range(number))
    end = time.monotonic() + options.limit_s
    waiting, running = list(chosen), list[Running]()
    outcomes: dict[str, str] = {}
    while waiting or running:
        for measurement in list(waiting):
            if time.monotonic() + measurement.seconds > end:
                outcomes[measurement.name] = "not begun: too little time is left"
                waiting.remove(measurement)
            elif measurement.gpus <= len(free):
                gpus, free = free[: measurement.gpus], free[measurement.gpus :]
                running.append(start(measurement, gpus, options))
                waiting.remove(measurement)
        time.sleep(0.2)
        for one in list(running):
            seconds = time.monotonic() - one.started
            if one.process.poll() is None and seconds < one.measurement.seconds:
                continue
            outcomes[one.measurement.name] = finish(one, seconds)
            running.remove(one)
            free = sorted([*free, *one.gpus])
            print(f"{one.measurement.name}: {outcomes[one.measurement.name]}", flush=True)
    return outcomes


def start(measurement: Measurement, gpus: list[int], options: argparse.Namespace) -> Running:
    out = str(options.out.resolve())
    command = measurement.rehearsal if options.rehearse else measurement.command
    words = [word.replace("$OUT", out) for word in shlex.split(command)]
    visible = {} if options.rehearse else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    with log_of(options.out, measurement).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=os.environ | visible | {"PYTHONPATH": path, "NCCL_NVLS_ENABLE": "0"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(measurement, process, gpus, time.monotonic())


def finish(one: Running, seconds: float) -> str:
    """End what still runs of a measurement, and return how it ended in words."""
    code = one.process.poll()
    if code is None:
        os.killpg(one.process.pid, 9)
        one.process.wait()
        return f"ended after its {one.measurement.seconds:.0f} s"
    return f"done in {seconds:.0f} s" if code == 0 else f"failed with {code} after {seconds:.0f} s"


def log_of(directory: Path, measurement: Measurement) -> Path:
    words = "".join(c if c.isalnum() else " " for c in measurement.name).split()
    return directory / ("-".join(words) + ".log")


if __name__ == "__main__":
    sys.exit(main())
