"""Tokens a second that one engine gives the way a worker asks, beside the limit: all prompts in one
request.

    python benchmarks/generation.py [--requests 256] [--tokens 256] [--rounds 3]

A worker sends a request for each response, wants log-probabilities and the weights' version of each
token, and reads the answers in one process. In turns with that, SGLang gets the same prompts as one
batch in one request: what is left is its own work. The engine has random weights and our plugin;
responses have the same length, and no prompt is known to the prefix cache. Without a GPU the
quickstart's model is served, on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import torch

from benchmarks.processes import small_engine
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port

GPUS = torch.cuda.device_count()
EXAMPLE = Path(__file__).parents[1] / "examples" / ("throughput" if GPUS else "quickstart")
PROMPT = 5
WORDS = range(3, 13)  # both examples' tokenizers have these
_names = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256 if GPUS else 32)
    parser.add_argument("--tokens", type=int, default=256 if GPUS else 48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--engine-args", default="", help="more of the server's arguments, in one string"
    )
    options = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "make_data.py"), str(EXAMPLE)], check=True)
    asyncio.run(measure(options))


async def measure(options: argparse.Namespace) -> None:
    port = free_port()
    room = str(2 * options.requests * (PROMPT + options.tokens))
    arguments = ["--load-format", "dummy", "--max-total-tokens", room, *options.engine_args.split()]
    server = small_engine(
        EXAMPLE / "model", port, *arguments, way=f"{PATH}/launch_server.py", cpu=not GPUS
    )
    seconds: dict[str, list[float]] = {"a request for each response": [], "all in one request": []}
    work: list[float] = []
    try:
        async with Client(f"http://127.0.0.1:{port}") as engine:
            await server.ready(engine, 240)
            for _ in range(options.rounds + 1):
                seconds["all in one request"].append(await whole(engine, options))
                before = time.process_time()
                seconds["a request for each response"].append(await singly(engine, options))
                work.append(time.process_time() - before)
    finally:
        server.terminate()
        server.wait(60)
    machine = torch.cuda.get_device_name() if GPUS else f"{os.cpu_count()} cores"
    medians = {
        way: statistics.median(rounds[1:]) for way, rounds in seconds.items()
    }  # the first round warms up
    tokens = options.requests * options.tokens
    print(
        f"{options.requests} responses of {options.tokens} tokens, {machine}; medians of "
        f"{options.rounds}"
    )
    print("| | seconds | tokens/s | of the limit |\n|---|---|---|---|")
    for way, median in medians.items():
        share = medians["all in one request"] / median
        print(f"| {way} | {median:.2f} | {tokens / median:,.0f} | {share:.0%} |")
    print(f"the worker's own work: {statistics.median(work[1:]):.2f} s of a core")


async def singly(engine: Client, options: argparse.Namespace) -> float:
    started = time.perf_counter()
    calls = (
        engine.generate(f"one-{next(_names)}", prompt, sampling(options))
        for prompt in prompts(options.requests)
    )
    generations = await asyncio.gather(*calls)
    assert all(len(generation.tokens) == options.tokens for generation in generations)
    return time.perf_counter() - started


async def whole(engine: Client, options: argparse.Namespace) -> float:
    body = {
        "input_ids": prompts(options.requests),
        "sampling_params": sampling(options),
        "return_logprob": True,
    }
    started = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=600)
    async with engine.session.post(f"{engine.url}/generate", json=body, timeout=timeout) as answer:
        generations = await answer.json()
        answer.raise_for_status()
    assert all(len(generation["output_ids"]) == options.tokens for generation in generations)
    return time.perf_counter() - started


def sampling(options: argparse.Namespace) -> dict[str, object]:
    return {"max_new_tokens": options.tokens, "ignore_eos": True, "temperature": 1.0}


def prompts(number: int) -> list[list[int]]:
    return [random.choices(WORDS, k=PROMPT) for _ in range(number)]


if __name__ == "__main__":
    main()
