"""Cost of a checkpoint for training, written in its way and beside it, and for the disk alone.

    OMP_NUM_THREADS=1 python benchmarks/checkpoints.py [--shape small]
        [--rounds 8] [--async-only] [--out docs/results/checkpoints.md]

One trainer process, on the GPU where there is one, with a random model. Steps are timed without any
checkpoint, then checkpoints are written: the time that `save` holds training up, and how much
longer the steps beside the writing take. The memory of their copies is got before all that, as a
run gets it while its engines start. The first of each kind stands alone.
Each is removed before the next: the disk needs room for one. The limit is a plain write of as many
bytes, with fsync.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import SHAPES, write_config
from sluice.api import RLJobSpec
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.checkpoint.checkpoint_directory import path_of
from sluice_trainer.checkpoint.checkpoint_directory import steps as steps_of
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.memory import staging

# Tokens that the sequences are made of: every shape has as many.
VOCAB = 2048
WARM_UP = 3
# Bytes of the plain write; drawing random ones takes longer than writing them.
MOST_PLAIN = 2 << 30


def make_policy(directory: Path, shape: str) -> MegatronPolicy:
    write_config(directory, shape, "bfloat16")
    spec = {
        "model": {"path": str(directory), "init": "random"},
        "data": {"prompts": [{"path": "none.jsonl"}]},
        "reward": {"type": "exact_match"},
        "trainer": {"steps": 1000, "gpusPerNode": int(DEVICE.type == "cuda")},
        "checkpoint": {"keep": 1},
    }
    return MegatronPolicy(
        RLJobSpec.model_validate(spec), model_dir=directory, timeout=timedelta(minutes=5)
    )


def train(policy: MegatronPolicy) -> float:
    """Seconds of one step on 8 sequences of 128 tokens."""
    random = np.random.default_rng(policy.step)
    shard = [
        TrainSequence(
            tokens=random.integers(0, VOCAB, 128).astype(np.int32),
            response_length=64,
            loss_mask=np.ones(64, np.uint8),
            rollout_log_probs=np.full(64, -9, np.float32),
            advantage=float(random.normal()),
        )
        for _ in range(8)
    ]
    started = time.perf_counter()
    policy.train([shard], [BatchTotals(8, 8 * 64)])
    return time.perf_counter() - started


def reserve(policy: MegatronPolicy) -> tuple[float, float]:
    """Seconds that the memory of the copies holds a start up, and until it is there."""
    began = time.perf_counter()
    policy.reserve_copies()
    held = time.perf_counter() - began
    staging.finish_reservations()
    there = time.perf_counter() - began
    print(f"memory of the copies: held {held:.2f} s, is there {there:.1f} s", file=sys.stderr)
    return held, there


def measure(
    policy: MegatronPolicy, directory: Path, rounds: int, *, beside: bool
) -> dict[str, float]:
    """Medians: seconds that a save holds training up, the step beside it, and from its begin until
    it is durable; and what the first one held up."""
    held, steps, until = [], [], []
    for number in range(1, rounds + 1):
        for step in steps_of(directory):
            shutil.rmtree(path_of(directory, step))
        began = time.perf_counter()
        policy.begin_save(directory, policy.step, background=beside)
        durable = None if beside else policy.finish_save(directory, wait=True)
        held.append(time.perf_counter() - began)
        while durable is None:
            steps.append(train(policy))
            polled = time.perf_counter()
            durable = policy.finish_save(directory, wait=False)
            held[-1] += time.perf_counter() - polled
        until.append(time.perf_counter() - began)
        print(
            f"checkpoint {number} of {rounds}: held {held[-1]:.2f} s, written {until[-1]:.1f} s",
            file=sys.stderr,
        )
        train(policy)
    later = {"held": held[1:] or held, "step": steps, "until": until}
    return {"first": held[0]} | {name: statistics.median(v) for name, v in later.items() if v}


def plain_write(directory: Path, size: int) -> float:
    """Seconds to write as many bytes to one file, and sync it; of many, so many parts of a part."""
    part = min(size, MOST_PLAIN)
    data, seconds = os.urandom(part), []
    for _ in range(3):
        started = time.perf_counter()
        with (directory / "plain").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * size / part


def table(rows: list[tuple[str, Any]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=8, help="checkpoints of each kind")
    parser.add_argument("--async-only", action="store_true", help="none that training waits for")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        policy = make_policy(directory, arguments.shape)
        planned, reserved = reserve(policy)
        bare = statistics.median(
            [train(policy) for _ in range(WARM_UP + arguments.rounds)][WARM_UP:]
        )
        first, second = directory / "first", directory / "second"
        now: dict[str, float] = {}
        if not arguments.async_only:
            now = measure(policy, first, arguments.rounds, beside=False)
            shutil.rmtree(first)
        beside = measure(policy, second, arguments.rounds, beside=True)
        size = sum(file.stat().st_size for file in second.rglob("*.distcp"))
        limit = plain_write(directory, size)
    load = os.getloadavg()[0]
    text = table(
        [
            ("checkpoint (weights, fp32 Adam)", f"{size / 2**20:.0f} MiB"),
            ("a step without a checkpoint", f"{bare:.3f} s"),
            ("a plain write of as many bytes with fsync: the limit", f"{limit:.2f} s"),
            *(
                [("`async: false`: a save holds training up", f"{now['held']:.2f} s")]
                if now
                else []
            ),
            (
                "memory of the copies: holds the start up, is there",
                f"{planned:.2f} s, {reserved:.1f} s",
            ),
            ("`async: true`: the first save holds training up", f"{beside['first']:.2f} s"),
            ("`async: true`: a later one (copying, completing)", f"{beside['held']:.2f} s"),
            ("`async: true`: a step beside the writing", f"{beside['step']:.2f} s"),
            ("`async: true`: until the checkpoint counts", f"{beside['until']:.2f} s"),
            ("load average of the machine", f"{load:.1f} on {os.cpu_count()} cores"),
        ]
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(f"# Checkpoints\n\n{text}\n")


if __name__ == "__main__":
    main()
