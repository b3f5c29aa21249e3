"""Tokens a second of an engine that computes with adapters, beside the same model without any.

    python benchmarks/adapters.py [--shape qwen3-4b] [--rank 32] [--adapters 8] [--requests 256]
        [--tokens 256] [--rounds 3] [--json FILE]

Four servers run one after the other. `merged` serves the model alone, as with merged weights.
`added` is an engine of one job, which adds the adapter to its weights when a trainer sends it.
`pool` is an engine of a pool: jobs send their adapters over NCCL, and each asks for its part of the
responses, at first one job for all of them. `sglang` is SGLang without our plugin, which has read
the same number of adapters from files. Weights are random, no prompt is known to a prefix cache,
all responses have the same length. Needs two GPUs: the trainer's process has the second one.
`--servers merged sglang` needs one.
Without GPUs, on which SGLang alone serves no adapters, a tiny model is the rehearsal.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.shapes import SHAPES, write_config
from benchmarks.updates import NVLINK, random_engine, update, update_sender
from sluice.engines.plugin_common import pool_credential
from sluice.engines.protocol import ADAPTER_PREFIX, ADAPTER_SCALING
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.plugin.__main__ import PATH

GPUS = torch.cuda.device_count()
KEY = "5a" * 32
PROMPT = 64
_names = itertools.count()
# Returns the body of a request, besides its prompt, and the client that sends it.
Way = Callable[[int], tuple[Client, dict[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b" if GPUS else "tiny")
    parser.add_argument("--rank", type=int, default=32 if GPUS else 4)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--requests", type=int, default=256 if GPUS else 32)
    parser.add_argument("--tokens", type=int, default=256 if GPUS else 32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--servers", nargs="+", default=["merged", "added", "pool", *(["sglang"] if GPUS else [])]
    )
    parser.add_argument("--json", type=Path, help="file of the result")
    options = parser.parse_args()
    if GPUS > 1:  # of this process, the trainer's: its threads and NCCL then know no other one
        os.environ |= {"CUDA_VISIBLE_DEVICES": "1", **NVLINK}
    with tempfile.TemporaryDirectory() as directory:
        rates = asyncio.run(measure(options, Path(directory)))
    machine = torch.cuda.get_device_name() if GPUS else f"{os.cpu_count()} cores"
    print(
        f"{options.shape}, rank {options.rank}, {options.requests} responses of {options.tokens} "
        f"tokens, {machine}; medians of {options.rounds} rounds (least to most)"
    )
    print("| server | adapters in a batch | tokens/s | of merged |\n|---|---|---|---|")
    limit = statistics.median(rates["merged", 0])
    for (server, count), found in rates.items():
        median = statistics.median(found)
        print(
            f"| {server} | {count} | {median:,.0f} ({min(found):,.0f} to {max(found):,.0f}) "
            f"| {median / limit:.0%} |"
        )
    if options.json:
        rows = [{"server": s, "adapters": n, "tokens_per_second": r} for (s, n), r in rates.items()]
        options.json.write_text(json.dumps(vars(options) | {"rows": rows}, default=str, indent=2))


async def measure(
    options: argparse.Namespace, directory: Path
) -> dict[tuple[str, int], list[float]]:
    model = directory / "model"
    model.mkdir()
    write_config(model, options.shape, "bfloat16" if GPUS else "float32")
    rates: dict[tuple[str, int], list[float]] = {}
    servers = {"merged": merged, "added": added, "pool": pool, "sglang": sglang}
    for server in options.servers:
        serving = servers[server]
        async with serving(options, directory) as ways:
            for count, way in ways.items():
                rounds = [await rate(options, way) for _ in range(options.rounds + 1)]
                rates[server, count] = rounds[1:]  # the first one warms up
                print(f"{server}, {count} adapters: {rounds[-1]:,.0f} tokens/s", flush=True)
    return rates


async def rate(options: argparse.Namespace, way: Way) -> float:
    """Return the tokens a second of one round of requests."""
    sampling = {"max_new_tokens": options.tokens, "ignore_eos": True, "temperature": 1.0}

    async def ask(number: int) -> None:
        client, fields = way(number)
        prompt = random.choices(range(3, 1000), k=PROMPT)
        rid = f"request-{next(_names)}"
        body = client.body(rid, prompt, sampling, "") | fields
        status, text = await client.ask(body)
        if status != 200:
            raise SystemExit(f"error: the engine answered {status}: {text[:500]}")

    started = time.perf_counter()
    await asyncio.gather(*(ask(number) for number in range(options.requests)))
    return options.requests * options.tokens / (time.perf_counter() - started)


def engine(
    options: argparse.Namespace, directory: Path, way: str, arguments: list[str], **variables: str
) -> AbstractAsyncContextManager[int]:
    return random_engine(
        directory / "model",
        options.requests,
        PROMPT + options.tokens,
        *arguments,
        way=way,
        variables=variables,
    )


def lora_arguments(options: argparse.Namespace) -> list[str]:
    return [
        *("--enable-lora", "--max-lora-rank", str(options.rank)),
        *("--max-loras-per-batch", str(options.adapters + 1)),
        *([] if GPUS else ["--lora-backend", "torch_native"]),
    ]


@asynccontextmanager
async def merged(options: argparse.Namespace, directory: Path) -> AsyncIterator[dict[int, Way]]:
    script = f"{PATH}/launch_server.py"
    async with (
        engine(options, directory, script, []) as port,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        await client.wait_ready(30)
        yield {0: lambda _: (client, {})}


@asynccontextmanager
async def added(options: argparse.Namespace, directory: Path) -> AsyncIterator[dict[int, Way]]:
    settings = {"rank": options.rank, "versions": 0, "layers": ["all-linear"]}
    script = f"{PATH}/launch_server.py"
    async with (
        engine(options, directory, script, [], SLUICE_LORA=json.dumps(settings)) as port,
        sent(options, 0, port, "", {"lora": "adapter"}) as client,
    ):
        yield {1: lambda _: (client, {})}


@asynccontextmanager
async def pool(options: argparse.Namespace, directory: Path) -> AsyncIterator[dict[int, Way]]:
    settings = {"rank": options.rank, "versions": 1, "jobs": options.adapters}
    arguments = [*lora_arguments(options), "--lora-target-modules", "all"]
    script = f"{PATH}/launch_server.py"
    variables = {"SLUICE_LORA": json.dumps(settings), "SLUICE_POOL_KEY": KEY}
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(
            engine(options, directory, script, arguments, **variables)
        )
        clients = [
            await stack.enter_async_context(job(options, number, port))
            for number in range(options.adapters)
        ]
        yield {
            1: lambda _: (clients[0], {}),
            len(clients): lambda number: (clients[number % len(clients)], {}),
        }


@asynccontextmanager
async def job(options: argparse.Namespace, number: int, port: int) -> AsyncIterator[Client]:
    """Join a pool as a job's trainer and worker do, and send an adapter."""
    credential = pool_credential.credential(KEY, f"bench/job-{number}", 1, created=0)
    os.environ[pool_credential.VARIABLE] = credential
    tag = pool_credential.name_start(credential)
    sync = {"lora": "adapter", "pauseMode": "versions"}
    async with sent(options, number, port, tag, sync) as client:
        del os.environ[pool_credential.VARIABLE]
        yield client


@asynccontextmanager
async def sent(
    options: argparse.Namespace, number: int, port: int, tag: str, weight_sync: dict[str, str]
) -> AsyncIterator[Client]:
    """Send an adapter to an engine, and yield a client of it."""
    async with (
        update_sender(port, weight_sync, f"trainer-0-{number}", tag) as sender,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        tensors = adapter(options, number, "cuda" if GPUS else "cpu")
        await update(sender, 1, tensors, 1 << 30)
        await client.wait_ready(30)
        yield client


@asynccontextmanager
async def sglang(options: argparse.Namespace, directory: Path) -> AsyncIterator[dict[int, Way]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    # SGLang reads no adapter from a file if the model's weights are made up by itself.
    with torch.device("cuda" if GPUS else "cpu"):
        config = AutoConfig.from_pretrained(directory / "model")
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    if GPUS:
        torch.cuda.empty_cache()  # the engine may have the same GPU
    names = [f"adapter-{number}" for number in range(options.adapters)]
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": options.rank,
        "lora_alpha": options.rank,
        "target_modules": [name for name, _, _ in layers(options)],
    }
    for number, name in enumerate(names):
        files = directory / name
        files.mkdir()
        tensors = {k: t for k, t in adapter(options, number, "cpu") if k != ADAPTER_SCALING}
        save_file(tensors, files / "adapter_model.safetensors")
        (files / "adapter_config.json").write_text(json.dumps(adapter_config))
    paths = [f"{name}={directory / name}" for name in names]
    arguments = [*lora_arguments(options), "--load-format", "auto", "--lora-paths", *paths]
    async with (
        engine(options, directory, "-m sglang.launch_server", arguments) as port,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        await client.wait_ready(30)
        yield {
            1: lambda _: (client, {"lora_path": names[0]}),
            len(names): lambda number: (client, {"lora_path": names[number % len(names)]}),
        }


def layers(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return name, inputs and outputs of a layer's linear modules."""
    shape = SHAPES[options.shape]
    hidden, ffn, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    return [
        ("q_proj", hidden, heads),
        ("k_proj", hidden, kv_heads),
        ("v_proj", hidden, kv_heads),
        ("o_proj", heads, hidden),
        ("gate_proj", hidden, ffn),
        ("up_proj", hidden, ffn),
        ("down_proj", ffn, hidden),
    ]


def adapter(options: argparse.Namespace, seed: int, device: str) -> list[tuple[str, torch.Tensor]]:
    """Return a random adapter of all linear layers by PEFT's names."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if GPUS else torch.float32
    drawn = [(ADAPTER_SCALING, torch.ones(1, device=device))]
    for number in range(SHAPES[options.shape]["num_hidden_layers"]):
        for name, inputs, outputs in layers(options):
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            for side, size in (("A", (options.rank, inputs)), ("B", (outputs, options.rank))):
                tensor = torch.empty(size, dtype=dtype, device=device)
                key = f"model.layers.{number}.{part}.{name}.lora_{side}.weight"
                drawn.append((ADAPTER_PREFIX + key, tensor.normal_(0, 0.01, generator=generator)))
    return sorted(drawn, key=lambda named: named[0])


if __name__ == "__main__":
    main()
