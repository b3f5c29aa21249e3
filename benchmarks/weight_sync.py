"""A weight update from the trainer's GPUs to SGLang engines, phase by phase, beside a bare
broadcast of the same bytes.

    python benchmarks/weight_sync.py --shape qwen3-4b [--sources 1] [--engines 1]
        [--fan-out direct,chain] [--buckets 1024,4096] [--lora-rank 32] [--out DIR]

Everything but the workers and the optimizer is what a job runs: Megatron's model, gather and
conversion, the rendezvous process, the update protocol, SGLang servers with our plugin and random
weights. The first update, which also makes the communicators, is printed apart. `bare` is one
broadcast of as many bytes between the same two GPUs, with nothing else. GPUs are taken in order:
first the sources', then the engines', then the first ones once more (a chain alone reaches an
engine that shares its source's GPU: NCCL connects no GPU with itself). With several ways to fan
out, each is measured by sources of its own, at the same engines. Without a GPU a tiny model goes
over gloo: a rehearsal.

With --lora-rank an update brings an adapter of all linear layers instead of all weights, as
weightSync.lora: adapter does, and --pause-mode versions interrupts no response.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.fan_out import ENGINES, chain, direct
from benchmarks.shapes import SHAPES, write_config
from benchmarks.weight_sync_engines import BARE, engine, rendezvous, run_ranks, with_members
from benchmarks.weight_sync_source import GPUS, PHASES, updates, write_options
from sluice_trainer.model.huggingface_config import read_shape


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b" if GPUS else "tiny")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to save time")
    parser.add_argument("--sources", type=int, default=1, help="trainer ranks")
    parser.add_argument("--tensor", type=int, default=1, help="tensor parallel size of the trainer")
    parser.add_argument("--expert", type=int, default=1, help="expert parallel size of the trainer")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument(
        "--engine-gpus", type=int, default=1, help="GPUs, and tensor parallel size, of an engine"
    )
    parser.add_argument(
        "--engine-args", default="", help="further arguments of the engines' servers, as one word"
    )
    parser.add_argument(
        "--buckets", default="512,1024,2048,4096,16384", help="MiB, one measurement each"
    )
    parser.add_argument(
        "--fan-out",
        default="direct",
        help="direct, chain, or both divided by a comma: how a source's engines get the weights",
    )
    parser.add_argument("--pause-mode", default="retract")
    parser.add_argument(
        "--load", type=int, default=0, help="requests that each engine is working on all the while"
    )
    parser.add_argument(
        "--between",
        type=float,
        default=3.0,
        help="seconds between updates under load, as steps have",
    )
    parser.add_argument(
        "--single-experts", action="store_true", help="each of a mixture's experts by itself"
    )
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="send an adapter of this rank alone"
    )
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument(
        "--check",
        action="store_true",
        help="ask all engines the same, whose answers must agree; on a GPU the first ones wait a "
        "minute and more for kernels that are compiled",
    )
    parser.add_argument("--out", type=Path, help="directory of the result's JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure(options, Path(directory))


def measure(options: argparse.Namespace, directory: Path) -> None:
    dtype = "bfloat16" if GPUS else "float32"
    write_config(directory, options.shape, dtype, options.layers)
    if options.lora_rank:  # which is sent to engines with the same files; they make up the weights
        save_file({"norm.weight": torch.zeros(1)}, directory / "model.safetensors")
    write_options(directory, options)
    with ExitStack() as stack:
        address = stack.enter_context(rendezvous(directory))
        servers = [
            stack.enter_context(engine(options, number, directory))
            for number in range(options.engines)
        ]
        asyncio.run(with_members(address, servers, options, directory))
    ways = options.fan_out.split(",")
    results = [json.loads(updates(directory, way).read_text()) for way in ways]
    result = results[0] | {
        "rows": [row for way_result in results for row in way_result["rows"]],
        "first": {way: way_result["first"] for way, way_result in zip(ways, results, strict=True)},
    }
    run_ranks(BARE, [str(directory), ways[0]], 2, [0, options.sources] if GPUS else [])
    result |= json.loads((directory / "bare.json").read_text())
    result |= {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "shape": options.shape,
        "layers": read_shape(directory).layers,
        "sources": options.sources,
        "tensor": options.tensor,
        "expert": options.expert,
        "engines": options.engines,
        "engine_gpus": options.engine_gpus,
        "pause_mode": options.pause_mode,
        "load": options.load,
        "single_experts": options.single_experts,
        "lora_rank": options.lora_rank,
    }
    table(result)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"weight-sync-{options.shape}"
        name += f"-{options.layers}-layers" if options.layers else ""
        name += f"-{options.sources}-to-{options.engines}x{options.engine_gpus}"
        name += f"-{options.pause_mode}-{options.load}"
        name += f"-rank-{options.lora_rank}" if options.lora_rank else ""
        name += "-single-experts.json" if options.single_experts else ".json"
        (options.out / name).write_text(json.dumps(result, indent=2) + "\n")


def table(result: dict[str, Any]) -> None:
    trainer = (
        f"{result['sources']} trainer ranks (tensor {result['tensor']}, expert {result['expert']})"
    )
    engines = f"{result['engines']} engines of {result['engine_gpus']} GPUs"
    print(
        f"{result['shape']}, {result['layers']} layers, {result['bytes'] / 1e6:.0f} MB: {trainer} "
        f"-> {engines}, {result['machine']}"
    )
    if result["lora_rank"]:
        print(f"an adapter of rank {result['lora_rank']} alone")
    print(f"pause mode {result['pause_mode']}, {result['load']} requests running at each engine")
    print(f"bare broadcast of the same bytes: {result['bare'] * 1e3:.1f} ms")
    first = ", ".join(f"{way} {seconds * 1e3:.0f} ms" for way, seconds in result["first"].items())
    print(f"first update: {first}; gather and conversion alone: {result['convert'] * 1e3:.1f} ms")
    print(
        f"{'fan-out':>8} {'bucket MiB':>10} {'update':>8} "
        + " ".join(f"{phase:>8}" for phase in PHASES)
        + "   update/bare"
    )
    for row in result["rows"]:
        phases = " ".join(f"{row[phase] * 1e3:8.1f}" for phase in PHASES)
        print(
            f"{row['fan_out']:>8} {row['bucket']:>10} {row['update'] * 1e3:8.1f} {phases}   "
            f"{row['update'] / result['bare']:.2f}"
        )
    print("medians in ms; paused: from the first pause to the last resume")
    print(f"\n{result['shape']} from one trainer rank over this link, computed, not measured (ms)")
    print(f"{'engines':>8} {'direct':>9} {'chain':>9}")
    bandwidth = result["bytes"] / result["bare"]
    for count in ENGINES:
        times = (way(count, result["bytes"], bandwidth) for way in (direct, chain))
        print(f"{count:>8} " + " ".join(f"{seconds * 1e3:9.0f}" for seconds in times))


def machine() -> str:
    return (
        f"{GPUS} x {torch.cuda.get_device_name()}"
        if GPUS
        else f"{platform.machine()}, {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
