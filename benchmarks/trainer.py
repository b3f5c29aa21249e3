"""Tokens per second of an RL training step on GPUs, beside what the arithmetic allows and what a
peer publishes.

    python benchmarks/trainer.py --shape qwen3-0.6b [--gpus 4 --tensor 2] [--tokens 16384]
        [--backend fsdp] [--cpu-offload none optimizer] [--weight-gradients fused separate]
        [--lora-rank 0 32] [--max-tokens auto --tokens 1024 --sequences 64] [--profile] [--out DIR]

A step is what a job runs: policy forward and backward with the RL loss, gradient reduction and
clipping, AdamW. Every rank has `--sequences` responses of `--tokens` tokens, or long-tailed ones
(`--lengths lognormal`) of as many in all. FLOPs are counted as in prime-rl's and Megatron's
reports: 6 for each weight and token, causal attention by half, what is recomputed not counted.
Several ways of `--cpu-offload`, `--weight-gradients`, `--moments` (of Adam) and `--lora-rank` run
one after the other and end in a table. With `--max-tokens auto` micro-batches grow as in a job that
does not say how large they are: each step's size and speed are printed, and the median is of the
last size.
Without a GPU a tiny model is the rehearsal, in which nothing grows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.processes import on_ranks
from benchmarks.shapes import SHAPES, write_config
from sluice.api import RLJobSpec
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.backend import Backend
from sluice_trainer.backend_registry import backend_class
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.megatron.fused_operations import separate_weight_gradients
from sluice_trainer.model.huggingface_config import ModelShape, read_shape

GPUS = torch.cuda.device_count()
# Dense bf16 FLOP/s of an H100 SXM or H200, by the data sheet.
PEAK = 989e12
PROMPT = 256
AUTO = "auto"
# File that rank 0 writes next to the model.
RESULT = "result.json"
PEERS = {
    ("qwen3-0.6b", 1): "prime-rl 11,900",
    ("qwen3-4b", 8): "prime-rl 26,000 to 27,000",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b" if GPUS else "tiny")
    parser.add_argument(
        "--layers", type=int, help="fewer layers than the shape has, where it does not fit"
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--backend", choices=["megatron", "fsdp"], default="megatron")
    for name in ("tensor", "pipeline", "context", "expert"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16384 if GPUS else 256, help="of a sequence")
    parser.add_argument(
        "--sequences", type=int, default=4, help="of a rank (a data-parallel one) and step"
    )
    parser.add_argument("--lengths", choices=["equal", "lognormal"], default="equal")
    parser.add_argument(
        "--max-tokens",
        type=lambda word: word if word == AUTO else int(word),
        help="of a micro-batch; auto: as memory allows; default: --tokens",
    )
    parser.add_argument("--recompute", default="none")
    parser.add_argument(
        "--cpu-offload", nargs="+", choices=["none", "optimizer", "all"], default=["none"]
    )
    parser.add_argument(
        "--cpu-offload-fraction", type=float, help="of the optimizer, with --cpu-offload optimizer"
    )
    parser.add_argument(
        "--weight-gradients",
        nargs="+",
        choices=["fused", "separate"],
        default=["fused"],
        help="added to their sum by the product that makes them, or after it (Megatron)",
    )
    parser.add_argument("--moments", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument(
        "--lora-rank",
        nargs="+",
        default=["0"],
        help="0: all weights train; 32-nf4: over a 4-bit base (FSDP2)",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument(
        "--profile", action="store_true", help="print what one step's GPU time goes to"
    )
    parser.add_argument("--out", type=Path, help="directory of the result's JSON file")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory:
        options.offloaded, options.gradients, options.stored, options.adapter = options.way
        rank(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        longest = max(options.tokens, 4096)
        write_config(
            Path(directory),
            options.shape,
            "bfloat16",
            options.layers,
            max_position_embeddings=longest,
        )
        results = []
        ways = (options.cpu_offload, options.weight_gradients, options.moments, options.lora_rank)
        for way in product(*ways):
            code = on_ranks(__file__, options.gpus, "--directory", directory, "--way", *way)
            if code:
                sys.exit(code)
            results.append(json.loads(Path(directory, RESULT).read_text()))
        if len(results) > 1:
            compare(results)


def compare(results: list[dict[str, Any]]) -> None:
    """A table of the same steps, done in several ways."""
    print(
        "in host memory | gradients | moments | LoRA | step ms | tokens/s | GPU GiB | host GiB "
        "| loss"
    )
    for result in results:
        fraction = result["cpu_offload_fraction"]
        way = result["cpu_offload"] + (f", {fraction:g} of it" if fraction else "")
        print(
            f"{way:14} | {result['weight_gradients']:9} | {result['moments']:7} "
            f"| {result['lora_rank']:>4} "
            f"| {result['step_seconds'] * 1e3:7.0f} "
            f"| {result['tokens_per_second']:8,.0f} "
            f"| {result['peak_gib']:7.1f} | {result['host_gib']:8.1f} | {result['loss']:.6f}"
        )


def rank(options: argparse.Namespace) -> None:
    """One process of the trainer: the steps, timed on rank 0."""
    if GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    job, timeout = spec(options), timedelta(seconds=300)
    policy = backend_class(job)(job, model_dir=options.directory, timeout=timeout, total_steps=1000)
    if options.gradients == "separate":
        for chunk in policy._learner.chunks:  # type: ignore[attr-defined]
            separate_weight_gradients(chunk)
    seconds, sizes, tokens = list[float](), list[int](), 0
    for step in range(options.warm_up + options.steps):
        shard, totals = batch(
            options, policy.ranks.data_parallel_rank, policy.ranks.data_parallel_size, step
        )
        tokens = sum(len(s.tokens) for s in shard) * policy.ranks.data_parallel_size
        wait()
        started = time.perf_counter()
        metrics = policy.train([shard], [totals])
        wait()
        seconds.append(time.perf_counter() - started)
        sizes.append(int(metrics.get("perf/micro_batch_tokens", job.trainer.micro_batch_tokens)))
    timed = seconds[options.warm_up :]
    if options.max_tokens == AUTO:
        timed = by_size(sizes, seconds)[sizes[-1]]
        if dist.get_rank() == 0:
            tell_sizes(sizes, seconds, tokens)
    if options.profile:
        profiled(policy, options)
    host = host_memory()
    if dist.get_rank() == 0:
        report(
            options,
            read_shape(options.directory),
            shard,
            statistics.median(timed),
            tokens,
            metrics,
            host,
        )
    dist.destroy_process_group()


def by_size(sizes: list[int], seconds: list[float]) -> dict[int, list[float]]:
    """Seconds of the steps with micro-batches of each size; without the first of them, if there are
    more: it compiles kernels.
    """
    of_size: dict[int, list[float]] = {}
    for size, time_of_step in zip(sizes, seconds, strict=True):
        of_size.setdefault(size, []).append(time_of_step)
    return {size: times[1:] or times for size, times in of_size.items()}


def tell_sizes(sizes: list[int], seconds: list[float], tokens: int) -> None:
    """Print size and speed of each step, and what growing has brought. tokens: of a step."""
    for step, (size, time_of_step) in enumerate(zip(sizes, seconds, strict=True)):
        print(
            f"step {step}: micro-batches of {size:,} tokens, {time_of_step * 1e3:,.0f} ms, "
            f"{tokens / time_of_step:,.0f} tokens/s"
        )
    rates = {s: tokens / statistics.median(times) for s, times in by_size(sizes, seconds).items()}
    before, after = rates[sizes[0]], rates[sizes[-1]]
    print(
        f"{sizes[0]:,} tokens: {before:,.0f} tokens/s; {sizes[-1]:,} tokens: {after:,.0f} tokens/s "
        f"({after / before:.2f} times)",
        flush=True,
    )


def spec(options: argparse.Namespace) -> RLJobSpec:
    layout = {name: getattr(options, name) for name in ("tensor", "pipeline", "context", "expert")}
    trainer: dict[str, Any] = {
        "gpusPerNode" if GPUS else "processesPerNode": options.gpus,
        "parallelism": layout,
        "backend": options.backend,
    }
    trainer |= {
        "steps": 1000,
        "maxTokensPerGpu": max_tokens(options),
        "recompute": options.recompute,
        "cpuOffload": options.offloaded,
        "cpuOffloadFraction": fraction(options),
        "optimizer": {"expAvgDtype": options.stored, "expAvgSqDtype": options.stored},
    }
    if options.adapter != "0":
        rank, _, base = options.adapter.partition("-")
        trainer["lora"] = {"rank": int(rank)} | ({"quantizeBase": base} if base else {})
    model = {"path": str(options.directory), "init": "random"}
    data = {"prompts": [{"path": "none.jsonl"}]}
    return RLJobSpec.model_validate(
        {
            "model": model,
            "data": data,
            "reward": {"type": "random"},
            "trainer": trainer,
            "rollout": {"batchSize": 64},
        }
    )


def max_tokens(options: argparse.Namespace) -> int | None:
    """Of a micro-batch; None: as memory allows."""
    return None if options.max_tokens == AUTO else options.max_tokens or options.tokens


def fraction(options: argparse.Namespace) -> float | None:
    return options.cpu_offload_fraction if options.offloaded == "optimizer" else None


def batch(
    options: argparse.Namespace, rank: int, ranks: int, step: int
) -> tuple[list[TrainSequence], BatchTotals]:
    """This rank's sequences, and what all ranks have. The lengths are the same on every rank."""
    vocab = SHAPES[options.shape]["vocab_size"]
    draws = np.random.default_rng((step, rank))
    lengths = [options.tokens] * options.sequences
    if options.lengths == "lognormal":
        lengths = long_tailed(sum(lengths), options.tokens, np.random.default_rng(step))
    prompt = min(PROMPT, options.tokens // 4)
    shard = []
    for index, length in enumerate(lengths):
        response = length - min(prompt, length // 2)
        shard.append(
            TrainSequence(
                tokens=draws.integers(0, vocab, length).astype(np.int32),
                response_length=response,
                loss_mask=np.ones(response, np.uint8),
                rollout_log_probs=np.full(response, -np.log(vocab), np.float32),
                advantage=float(draws.normal()),
                group_id=index,
            )
        )
    responses = sum(s.response_length for s in shard)
    return shard, BatchTotals(len(shard) * ranks, responses * ranks, options.tokens)


def long_tailed(total: int, longest: int, draws: np.random.Generator) -> list[int]:
    """Lengths as reasoning models have them: lognormal around a quarter of the longest; their sum
    is `total`."""
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(np.clip(draws.lognormal(np.log(longest / 4), 0.8), 64, longest)))
    lengths[-1] -= sum(lengths) - total
    return [length for length in lengths if length >= 2]


def host_memory() -> float:
    """GiB that all ranks together have had at most in the machine's memory. Collective."""
    kib = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    kib = kib.cuda() if GPUS else kib
    dist.all_reduce(kib)
    return kib.item() / 2**20


def wait() -> None:
    if GPUS:
        torch.cuda.synchronize()


def flops(shape: ModelShape, lengths: list[int]) -> float:
    """Of forward and backward: 6 a weight and token, and causal attention 6 x length x heads x head
    size a layer."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    ffn = 3 * shape.hidden * shape.ffn
    if shape.experts:
        ffn = (
            3 * shape.hidden * shape.experts.ffn * shape.experts.per_token
            + shape.hidden * shape.experts.count
        )
    weights = shape.layers * (attention + ffn) + shape.hidden * shape.vocab
    return sum(
        6.0 * n * (weights + shape.layers * n * shape.heads * shape.head_dim) for n in lengths
    )


def profiled(policy: Backend, options: argparse.Namespace) -> None:
    """One more step under torch's profiler; rank 0 prints the kernels that took longest."""
    from torch.profiler import ProfilerActivity, profile

    shard, totals = batch(
        options, policy.ranks.data_parallel_rank, policy.ranks.data_parallel_size, 0
    )
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPUS else [])]
    with profile(activities=activities) as profiler:
        policy.train([shard], [totals])
        wait()
    if dist.get_rank() == 0:
        rows = profiler.key_averages()
        if GPUS:
            longest("on the device", rows, lambda row: row.self_device_time_total)
        longest("on the CPU", rows, lambda row: row.self_cpu_time_total)


def longest(where: str, rows: Any, time_of: Callable[[Any], float]) -> None:
    """Print the rows of a profile that took longest there."""
    whole = sum(time_of(row) for row in rows)
    print(f"profile of one step: {whole / 1e3:.0f} ms {where}, all together")
    for row in sorted(rows, key=time_of, reverse=True)[:28]:
        share = time_of(row) / whole
        print(f"{time_of(row) / 1e3:9.1f} ms {share:6.1%} {row.count:7d}  {row.key[:110]}")


def report(
    options: argparse.Namespace,
    shape: ModelShape,
    shard: list[Any],
    step: float,
    tokens: int,
    metrics: dict[str, float],
    host: float,
) -> None:
    rate = tokens / step
    model = flops(shape, [len(s.tokens) for s in shard]) / sum(len(s.tokens) for s in shard)
    layout = {
        name: getattr(options, name) for name in ("gpus", "tensor", "pipeline", "context", "expert")
    }
    result = {
        "machine": torch.cuda.get_device_name()
        if GPUS
        else platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "backend": options.backend,
        "shape": options.shape,
        "layers": shape.layers,
        **layout,
        "tokens": options.tokens,
        "max_tokens": options.max_tokens or options.tokens,
        "lengths": options.lengths,
        "sequences": len(shard),
        "recompute": options.recompute,
        "cpu_offload": options.offloaded,
        "cpu_offload_fraction": fraction(options),
        "weight_gradients": options.gradients,
        "moments": options.stored,
        "lora_rank": options.adapter,
        "step_seconds": step,
        "tokens_per_second": rate,
        "gflop_per_token": model / 1e9,
        "mfu": rate * model / (PEAK * options.gpus),
        "loss": metrics["train/loss"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if GPUS else 0.0,
        "host_gib": host,
    }
    (options.directory / RESULT).write_text(json.dumps(result))
    print(
        f"{options.backend}, {options.shape}, {shape.layers} layers, {result['machine']} "
        f"({', '.join(f'{name} {size}' for name, size in layout.items())}), {options.lengths} "
        f"lengths of {options.tokens} tokens, recompute {options.recompute}, "
        f"in host memory {options.offloaded}, weight gradients {options.gradients}, "
        f"moments {options.stored}, LoRA rank {options.adapter}: "
        f"step {step * 1e3:.0f} ms, {rate:,.0f} tokens/s, "
        f"{model / 1e9:.2f} GFLOP/token, MFU {result['mfu']:.1%}, "
        f"{result['peak_gib']:.0f} GiB, of the host {host:.0f}; "
        f"peer: {PEERS.get((options.shape, options.gpus), '-')}",
        flush=True,
    )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        other = "" if options.backend == "megatron" else f"-{options.backend}"
        name = f"trainer{other}-{options.shape}-{options.gpus}gpu"
        name += f"-t{options.tensor}p{options.pipeline}c{options.context}"
        name += f"e{options.expert}-{options.tokens}-{options.lengths}-{options.recompute}"
        name += "-moments-bf16" if options.stored == "bf16" else ""
        name += f"-lora-{options.adapter}" if options.adapter != "0" else ""
        name += "-auto" if options.max_tokens == AUTO else ""
        name += "-separate" if options.gradients == "separate" else ""
        name += {"none": "", "optimizer": "-optimizer-on-host", "all": "-host"}[options.offloaded]
        name += ".json"
        (options.out / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
