"""Updates, generation and log-probs of engines with each `rollout.precision`.

    python benchmarks/precision.py [--shape qwen3-4b] [--precisions bf16 fp8 fp8_block int8]
        [--requests 64 256] [--tokens 256] [--rounds 3] [--engine-args "..."] [--json FILE]

One engine after the other gets the same random weights, which the trainer's process quantizes
bucket by bucket as a job's trainer does. An *update* is the time from the pause until the engine
works with the new weights. Tokens a second count responses of equal length with log-probs. The
*gap* is the mean absolute difference between the log-probs of the engine and those of transformers
with the weights as they were before quantization, in bf16, of the same responses; the gap of `bf16`
is what kernels alone make. Random weights give nearly uniform policies, so gaps compare precisions
with each other and say little of a trained model. Needs two GPUs: the trainer's process has the
second one. Without GPUs a tiny model is the rehearsal.
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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES, write_config
from benchmarks.updates import NVLINK, random_engine, update, update_sender
from sluice.engines.plugin_common.precision import VARIABLE
from sluice.engines.protocol import Generation
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice_trainer.model.quantize import quantized

GPUS = torch.cuda.device_count()
PROMPT = 64
BUCKET = 1 << 30
_names = itertools.count()


@dataclass(frozen=True)
class Measured:
    """Figures of an engine."""

    update_ms: list[float]
    update_bytes: int
    rates: dict[int, list[float]]
    gap: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shape = "qwen3-4b" if GPUS else "tiny"
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8", "fp8_block", "int8"])
    parser.add_argument("--requests", nargs="+", type=int, default=[64, 256] if GPUS else [8])
    parser.add_argument("--tokens", type=int, default=256 if GPUS else 16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--engine-args", default="", help="more of the server's, as one word")
    parser.add_argument("--json", type=Path, help="file of the result")
    options = parser.parse_args()
    if GPUS > 1:  # of this process, the trainer's: its threads and NCCL then know no other one
        os.environ |= {"CUDA_VISIBLE_DEVICES": "1", **NVLINK}
    with tempfile.TemporaryDirectory() as directory:
        results = asyncio.run(measure(options, Path(directory)))
    machine = torch.cuda.get_device_name() if GPUS else f"{os.cpu_count()} cores"
    print(f"{options.shape}, {machine}; medians of {options.updates} updates and {options.rounds}")
    print("rounds of responses (least to most)")
    titles = [f"tokens/s, {number} requests" for number in options.requests]
    print("| precision | update GB | update ms | " + " | ".join(titles) + " | gap |")
    print("|---|---|---|" + "---|" * len(titles) + "---|")
    for precision, found in results.items():
        cells = [
            f"{found.update_bytes / 1e9:.2f}",
            f"{spread(found.update_ms, '.0f')}",
            *(spread(found.rates[number], ",.0f") for number in options.requests),
            f"{found.gap:.4f}",
        ]
        print(f"| {precision} | " + " | ".join(cells) + " |")
    if options.json:
        rows = {precision: vars(found) for precision, found in results.items()}
        options.json.write_text(json.dumps(vars(options) | {"rows": rows}, default=str, indent=2))


def spread(values: list[float], form: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


async def measure(options: argparse.Namespace, directory: Path) -> dict[str, Measured]:
    model = make_model(options, directory)
    results: dict[str, Measured] = {}
    for precision in options.precisions:
        async with random_engine(
            directory,
            max(options.requests),
            PROMPT + options.tokens,
            *options.engine_args.split(),
            way=f"{PATH}/launch_server.py",
            variables={} if precision == "bf16" else {VARIABLE: precision},
        ) as port:
            try:
                results[precision] = await measured(options, model, precision, port)
            except SystemExit as error:  # the other precisions are measured all the same
                print(f"{precision}: {error}", flush=True)
                continue
        found = results[precision]
        rates = {number: max(rates) for number, rates in found.rates.items()}
        print(f"{precision}: {found.update_ms} ms, {rates}, gap {found.gap}", flush=True)
    return results


def make_model(options: argparse.Namespace, directory: Path) -> Any:
    """Write the model's config and return it with random weights, as transformers has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(directory, options.shape, "bfloat16" if GPUS else "float32")
    if options.shape == "tiny":  # blocks of 128 x 128 need whole ones
        path = directory / "config.json"
        wider = {"hidden_size": 128, "num_key_value_heads": 4, "head_dim": 32}
        path.write_text(json.dumps(json.loads(path.read_text()) | wider))
    torch.manual_seed(0)
    with torch.device("cuda" if GPUS else "cpu"):
        config = AutoConfig.from_pretrained(directory)
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()


async def measured(options: argparse.Namespace, model: Any, precision: str, port: int) -> Measured:
    """Send updates to an engine, generate with it, and compare its log-probs."""
    milliseconds: list[float] = []
    sent = 0
    async with (
        update_sender(port, {}, "trainer-0") as sender,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        for version in range(options.updates + 1):
            started = time.perf_counter()
            sent = await update(sender, version, weights(model, precision), BUCKET)
            milliseconds.append(1000 * (time.perf_counter() - started))
        await client.wait_ready(30)
        rates = {
            number: [await rate(options, client, number) for _ in range(options.rounds + 1)][1:]
            for number in options.requests
        }
        gap = await difference(options, client, model)
    return Measured(milliseconds[1:], sent, rates, gap)


def weights(model: Any, precision: str) -> Iterable[tuple[str, Tensor]]:
    """Yield what the trainer sends: tied embeddings once."""
    named = ((name, tensor.detach()) for name, tensor in model.named_parameters())
    return named if precision == "bf16" else quantized(named, precision)


async def rate(options: argparse.Namespace, client: Client, requests: int) -> float:
    """Return the tokens a second of one round of requests."""
    started = time.perf_counter()
    await asyncio.gather(*(generate(client, prompt(), options.tokens) for _ in range(requests)))
    return requests * options.tokens / (time.perf_counter() - started)


async def generate(client: Client, tokens: list[int], length: int) -> Generation:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
    return await client.generate(f"request-{next(_names)}", tokens, sampling)


def prompt() -> list[int]:
    return random.choices(range(3, 1000), k=PROMPT)


async def difference(options: argparse.Namespace, client: Client, model: Any) -> float:
    """Return the mean absolute difference of log-probs between an engine and transformers."""
    prompts = [prompt() for _ in range(8)]
    answers = await asyncio.gather(*(generate(client, p, options.tokens) for p in prompts))
    differences: list[float] = []
    for tokens, answer in zip(prompts, answers, strict=True):
        row = torch.tensor([tokens + answer.tokens], device=model.device)
        with torch.no_grad():
            logits = model(row).logits[0, PROMPT - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, row[0, PROMPT:, None])[:, 0].cpu()
        differences += (expected - torch.tensor(answer.log_probs)).abs().tolist()
    return statistics.fmean(differences)


if __name__ == "__main__":
    main()
