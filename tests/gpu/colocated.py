"""Trainer and engine on one GPU, with everything that a job needs importable.

    python tests/gpu/colocated.py                          the task of examples/gpu/one-gpu.yaml
    python tests/gpu/colocated.py --faults                 engine and trainer are killed
    python tests/gpu/colocated.py --shape qwen3-4b --steps 5   random weights of a larger model
    python tests/gpu/colocated.py --lora --steps 12            an adapter alone is sent (a minute)

With `--lora` the engine keeps the model in host memory while it rests. If it lost the model, or got
another adapter, its log-probs would differ from the trainer's.

`--set` works as in `sluice run`. It prints each step's times and the GPU's memory in each turn, and
checks that the reward rises, that log-probs of trainer and engine agree, and that offloaded memory
returns unchanged. Otherwise it exits with code 1 and prints the ends of all logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.shapes import SHAPES, write_config  # noqa: E402
from tests.integration.run.laptop import Laptop  # noqa: E402

TIMES = {
    "step": "perf/step_time",
    "generate": "perf/train_wait_time",
    "wake up": "perf/wake_up_time",
    "train": "perf/actor_train_time",
    "update": "perf/update_weights_time",
    "transfer": "perf/update_weights/transfer_time",
    "sleep": "perf/sleep_time",
}
MEMORY = {
    "generating": "perf/gpu_memory/generating_gib",
    "resting": "perf/gpu_memory/resting_gib",
    "training": "perf/gpu_memory/training_gib",
    "publishing": "perf/gpu_memory/publishing_gib",
}
LARGE = (
    "reward={type: random}",
    "evaluation=null",
    "rollout.batchSize=16",
    "rollout.sampling.maxResponseTokens=512",
    "trainer.optimizer={lr: 1e-6}",
    "trainer.steps=1000",
    "checkpoint={everySteps: 1000, exportHF: false}",
)
LORA = (
    "model.init=pretrained",
    "trainer.lora={rank: 8, alpha: 16}",
    "weightSync.lora=adapter",
    "trainer.optimizer={lr: 1e-2}",
)
TOLERANCE = 0.1  # of log-probs, bf16


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=SHAPES, help="instead of the quickstart's tiny model and task"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=500, help="the run must be done by then")
    parser.add_argument("--set", action="append", default=[], help="as of `sluice run`")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--lora", action="store_true", help="an adapter of random weights")
    parser.add_argument("--out", type=Path, help="keep the run's directory here")
    parser.add_argument("--offload", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.offload:
        return check_offload(Path(arguments.offload))
    with tempfile.TemporaryDirectory() as scratch:
        run = prepare(Path(scratch), arguments)
        try:
            problems = [] if arguments.lora else offload(Path(scratch))
            problems += train(run, arguments)
        finally:
            run.stop()
            if arguments.out:
                arguments.out.mkdir(parents=True, exist_ok=True)
                for name in ("logs", "metrics.jsonl", "summary.json", "events.jsonl"):
                    _copy(run.directory / name, arguments.out / name)
        show(run)
        for problem in problems:
            print("FAILED:", problem)
        if problems:
            print(run.text()[-3000:])
            for log in sorted((run.directory / "logs").glob("*")):
                lines = [
                    line for line in log.read_text().splitlines() if 'HTTP/1.1" 200' not in line
                ]
                print(f"--- {log.name}\n" + "\n".join(lines[-25:])[-3000:])
        return 1 if problems else 0


def prepare(scratch: Path, arguments: argparse.Namespace) -> Laptop:
    shutil.copytree(
        ROOT / "examples/quickstart",
        scratch / "quickstart",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    subprocess.run(
        [sys.executable, "make_data.py", "."], cwd=scratch / "quickstart", check=True, timeout=120
    )
    (scratch / "gpu").mkdir()
    shutil.copy(ROOT / "examples/gpu/one-gpu.yaml", scratch / "gpu/job.yaml")
    overrides = [f"trainer.steps={arguments.steps}"]
    if arguments.shape:
        write_config(scratch / "quickstart/model", arguments.shape, "bfloat16")
        overrides = list(LARGE)
    if arguments.lora:
        save_random_weights(scratch / "quickstart/model")
        overrides += LORA
    overrides.append("rollout.engineArgs.logLevelHttp=info")  # its log says when it rests
    return Laptop(scratch / "gpu", scratch / "run", *overrides, *arguments.set)


def save_random_weights(model: Path) -> None:
    """Write weights beside the configuration of a model: adapters need a model on disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)


def offload(scratch: Path) -> list[str]:
    """Check offloading in a separate process, because the GPU must be free for the run."""
    command = [sys.executable, __file__, "--offload", str(scratch / "quickstart/model")]
    return [] if subprocess.run(command, timeout=300).returncode == 0 else ["offload: see above"]


def check_offload(model: Path) -> int:
    """Compare a trainer's tensors on the GPU before they are offloaded and after the restore."""
    import torch

    from sluice_trainer.megatron.policy import MegatronPolicy
    from sluice_trainer.memory.offload import memory_used
    from tests.integration.trainer import tiny

    gpus = min(torch.cuda.device_count(), 1)
    spec = tiny.spec(
        model,
        trainer={"gpusPerNode": gpus, "colocate": True, "offload": "all"},
        rollout={"gpusPerReplica": gpus},
        model={"path": str(model), "init": "random"},
        algorithm={"kl": {"lossCoef": 0.01}},
    )
    policy = MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=120))
    shard = [replace(sequence, tokens=sequence.tokens % 16) for sequence in tiny.batch(8, seed=0)]
    policy.train([shard], [tiny.totals(shard)])
    parts = [*policy._offload._weights, *(part for part in policy._offload._rest if part._preserve)]

    def snapshot() -> list[Any]:
        return [tensor.detach().clone().cpu() for part in parts for tensor in part._tensors()]

    before, full = snapshot(), memory_used()
    for _ in range(2):  # the second time host memory is allocated already
        started = time.perf_counter()
        policy.offload(weights=True)
        gone, out = memory_used(), time.perf_counter() - started
        started = time.perf_counter()
        policy.restore()
        back = time.perf_counter() - started
    size = sum(tensor.nbytes for tensor in before) / 2**30
    same = len(before) > 0 and all(
        torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True)
    )
    times = f"out {out * 1000:.0f} ms, back {back * 1000:.0f} ms"
    taken = f"the GPU {full / 2**30:.2f} -> {gone / 2**30:.2f} GiB"
    print(
        f"offload: {size:.2f} GiB of state, {taken}, {times}, {'unchanged' if same else 'CHANGED'}",
        flush=True,
    )
    return 0 if same else 1


def train(run: Laptop, arguments: argparse.Namespace) -> list[str]:
    """Train in a run, and return a line for each check that fails."""
    run.start()
    try:
        if arguments.faults:
            _kill_both(run)
        if arguments.shape:
            run.until_step(arguments.steps, arguments.seconds)
            run.stop()
        elif code := run.wait(arguments.seconds):
            return [f"sluice run ended with {code}"]
    except AssertionError as error:
        return [str(error)[:300]]
    records = list(run.steps().values())
    problems = []
    difference = max(record["train/train_rollout_logprob_abs_diff_max"] for record in records)
    if difference > TOLERANCE:
        problems.append(f"log-probs of trainer and engine differ by {difference}")
    first, last = records[0]["rollout/raw_reward"], records[-1]["rollout/raw_reward"]
    if arguments.lora and not max(r["train/grad_norm"] for r in records) > 0:
        problems.append("no gradient: the adapter stays as it was")
    # The frozen random weights learn little in so few steps.
    if not (arguments.shape or arguments.lora) and last < 2 * first:
        problems.append(f"the reward does not rise: {first} -> {last}")
    if not arguments.shape:
        summary = run.summary()
        lost = {
            name: summary[name] for name in ("groups_lost", "groups_trained_twice", "groups_failed")
        }
        if any(lost.values()):
            problems.append(str(lost))
    return problems


def _has_rested(log: Path) -> bool:
    """Return True once the engine of this log has released its memory three times."""
    return log.exists() and log.read_text().count("POST /release_memory") >= 3


def _kill_both(run: Laptop) -> None:
    for attempt, victim in ((1, "engine"), (2, "trainer")):
        log = run.directory / f"logs/one-gpu-rollout-0-{attempt}-0.engine.log"
        run.until(partial(_has_rested, log), "rests", 200)
        print("kill", victim, "at step", run.step(), flush=True)
        run.kill(victim)


def show(run: Laptop) -> None:
    steps = run.steps()
    if not steps:
        return
    chosen = [
        step
        for step in sorted(steps)
        if step <= 3 or step % max(1, len(steps) // 6) == 0 or step == max(steps)
    ]
    header = [
        "step",
        *(f"{name} s" for name in TIMES),
        *(f"{name} GiB" for name in MEMORY),
        "reward",
        "diff",
    ]
    print(" | ".join(header))
    for step in chosen:
        record = steps[step]
        row = [str(step), *(f"{record.get(key, 0):.3f}" for key in TIMES.values())]
        row += [f"{record.get(key, 0):.2f}" for key in MEMORY.values()]
        row += [
            f"{record['rollout/raw_reward']:.3f}",
            f"{record['train/train_rollout_logprob_abs_diff_max']:.1e}",
        ]
        print(" | ".join(cell.rjust(len(name)) for cell, name in zip(row, header, strict=True)))
    with contextlib.suppress(FileNotFoundError):
        print(json.dumps(run.summary()))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.exists():
        shutil.copy(source, target)


if __name__ == "__main__":
    sys.exit(main())
