"""A trainer rank of benchmarks/weight_sync.py, which updates the engines again and again.

torchrun -m benchmarks.weight_sync_source DIRECTORY WAY ATTEMPT
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sluice.api import RLJobSpec
from sluice.engines.protocol import ADAPTER_PREFIX
from sluice.engines.sglang.layout import Layout
from sluice.runtime.pod_env import Environment, read
from sluice_trainer.model.huggingface_config import read_shape

GPUS = torch.cuda.device_count()
PHASES = ("prepare", "pause", "transfer", "verify", "resume", "paused")


def write_options(directory: Path, options: argparse.Namespace) -> None:
    """Leave the options for the ranks, which are started with the directory alone."""
    (directory / "options.json").write_text(json.dumps(vars(options), default=str))


def read_options(directory: Path) -> argparse.Namespace:
    return argparse.Namespace(**json.loads((directory / "options.json").read_text()))


def updates(directory: Path, way: str) -> Path:
    """The file in which the sources of one way to fan out leave their timings."""
    return directory / f"updates-{way}.json"


def source(options: argparse.Namespace, directory: Path, way: str, attempt: int) -> None:
    """Measure each size of bucket; rank 0 leaves the timings in `updates`."""
    from sluice_trainer.loop.clients import connect
    from sluice_trainer.megatron import parallel
    from sluice_trainer.megatron.huggingface import mapping
    from sluice_trainer.megatron.model import building
    from sluice_trainer.megatron.model.config import transformer_config
    from sluice_trainer.weights.update import update_engines

    spec, env = job(options, directory, way), environment(directory, attempt)
    parallel.initialize(spec.trainer.parallelism, seed=1, timeout=timedelta(minutes=5))
    ranks = parallel.ranks(timedelta(minutes=5))
    shape = read_shape(directory)
    dtype = torch.bfloat16 if GPUS else torch.float32
    net = building.build(transformer_config(shape, spec.trainer.parallelism, dtype=dtype), shape)
    for parameter in (parameter for chunk in net for parameter in chunk.parameters()):
        parameter.data.normal_(0.0, 0.02)
    adapter = random_adapter(mapping.hf_tensors(net, shape), options.lora_rank)
    stack = ExitStack()
    session = stack.enter_context(connect(env, spec, threading.Event(), rank=ranks.rank)).engines

    receivers: frozenset[int] = frozenset()

    def weights(ranks_with_engines: frozenset[int]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal receivers
        receivers = ranks_with_engines
        stack_name = None if options.single_experts else Layout().stack_name
        whole = mapping.hf_tensors(net, shape, stack_name, receivers)
        return iter(adapter) if adapter else whole

    def update(version: int, bucket: int) -> tuple[float, dict[str, float]]:
        if options.load:
            time.sleep(
                options.between
            )  # or the engine still computes what it took back in the update before
        synchronise()
        started = time.perf_counter()
        outcomes = update_engines(weights, version, session, ranks, bucket_bytes=bucket << 20)
        seconds = time.perf_counter() - started
        failed = [reason for outcome in outcomes for reason in outcome.failed.values()]
        if failed or not outcomes:
            raise SystemExit(f"error: {failed or 'no engine took part'}")
        return seconds, {
            phase: max(outcome.seconds[phase] for outcome in outcomes) for phase in PHASES
        }

    sizes = [int(size) for size in options.buckets.split(",")]
    first, _ = update(1, sizes[0])
    version = 1
    rows: list[dict[str, Any]] = []
    for size in sizes:
        timings = []
        for _ in range(options.updates):
            version += 1
            seconds, phases = update(version, size)
            timings.append(phases | {"update": seconds})
        rows.append(
            {"bucket": size, "fan_out": way}
            | {key: statistics.median(timing[key] for timing in timings) for key in timings[0]}
        )
        if ranks.rank == 0:  # a machine may be taken away before the table
            ways = f"{way}, buckets of {size} MiB"
            print(f"{ways}: {rows[-1]['update'] * 1e3:.1f} ms", flush=True)
    convert, total = conversion(partial(weights, receivers), sizes[-1])
    if ranks.rank == 0:
        report = {"first": first, "rows": rows, "convert": convert, "bytes": total}
        updates(directory, way).write_text(json.dumps(report))
    stack.close()


def random_adapter(
    weights: Iterable[tuple[str, torch.Tensor]], rank: int
) -> list[tuple[str, torch.Tensor]]:
    """A small adapter of all linear layers by PEFT's names; empty if the rank is 0."""
    drawn = []
    for name, weight in weights if rank else ():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") and ".experts." not in layer:
            outputs, inputs = weight.shape
            for side, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensor = torch.empty(size, dtype=weight.dtype, device=weight.device)
                key = f"{ADAPTER_PREFIX}{layer}.lora_{side}.weight"
                drawn.append((key, tensor.normal_(0.0, 0.01)))
    return sorted(drawn, key=lambda named: named[0])


def conversion(
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]], bucket: int
) -> tuple[float, int]:
    """Seconds of gathering and laying out all weights, with nobody to send them to; and their
    bytes."""
    from sluice_trainer.weights.buckets import buckets

    seconds = []
    for _ in range(5):
        synchronise()
        started = time.perf_counter()
        total = sum(part.data.nbytes for part in buckets(weights(), bucket << 20, Layout()))
        synchronise()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), total


def synchronise() -> None:
    if GPUS:
        torch.cuda.synchronize()


def job(options: argparse.Namespace, directory: Path, way: str) -> RLJobSpec:
    gpus = options.sources if GPUS else 0
    # The trainer of a job that sends adapters; the ranks here take nothing else from it.
    adapters = {"backend": "fsdp", "lora": {"rank": options.lora_rank}}
    return RLJobSpec.model_validate({
        "model": {"path": str(directory), "init": "pretrained" if options.lora_rank else "random"},
        "data": {"prompts": [{"path": "none.jsonl"}]},
        "reward": {"type": "exact_match"},
        "rollout": {"gpusPerReplica": options.engine_gpus if GPUS else 0},
        "trainer": {
            "steps": 1, "gpusPerNode": gpus, "processesPerNode": options.sources,
            "parallelism": {"tensor": options.tensor, "expert": options.expert},
            **(adapters if options.lora_rank else {}),
        },
        "weightSync": {
            "pauseMode": options.pause_mode, "timeoutSeconds": 120, "fanOut": way,
            "lora": "adapter" if options.lora_rank else "merged",
        },
    })  # fmt: skip


def environment(directory: Path, attempt: int) -> Environment:
    variables = {
        "SLUICE_RENDEZVOUS": os.environ["SLUICE_RENDEZVOUS"],
        "SLUICE_CHECKPOINT_DIR": str(directory),
        "SLUICE_ATTEMPT": str(attempt),
    }
    return read("trainer", variables)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    source(read_options(place), place, sys.argv[2], int(sys.argv[3]))
