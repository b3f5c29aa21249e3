"""Tokens a second of an engine that is kept full with responses of very different lengths, as an
asynchronous job keeps it: wherever one ends, the next prompt comes.

    python benchmarks/refill.py [--model DIR] [--requests 512] [--typical 39] [--longest 2048]
        [--seconds 30] [--ways sglang ours mixed] [--engine-args "..."]

Half of the responses have less than --typical tokens, and every 50th has --longest, so that some
request ends with nearly every token. SGLang stops all that runs for each prompt that comes
(*sglang*). With *ours* (the plugin's gather.py) prompts wait for each other for a few passes;
*mixed* is SGLang's own way to run a prompt beside the others (`--enable-mixed-chunk`). *limit* is
what each of these engines gives where as many responses begin at once and have one length. Each
way has an engine of its own, one after another. Without a GPU the quickstart's model is served, on
a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.processes import small_engine
from sluice.engines.sglang.generate import Client
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.environment import free_port

GPUS = torch.cuda.device_count()
EXAMPLE = Path(__file__).parents[1] / "examples" / ("throughput" if GPUS else "quickstart")
WAYS = {"sglang": (0, ""), "ours": (8, ""), "mixed": (0, "--enable-mixed-chunk")}
"""Passes for which prompts wait, and arguments."""
PROMPT = 48 if GPUS else 8
GROUP = 8
WORDS = range(3, 13)  # both examples' tokenizers have these
EQUAL = 128 if GPUS else 24
"""Tokens of each response of the limit."""
WARM_UP = 5.0
_names = itertools.count()


@dataclass(slots=True)
class Done:
    """Responses that have ended: their tokens, and the seconds that each took for a token."""

    tokens: int = 0
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=512 if GPUS else 32)
    parser.add_argument(
        "--typical", type=float, default=39.0, help="tokens of half of the responses"
    )
    parser.add_argument("--longest", type=int, default=2048 if GPUS else 50)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["sglang", "ours", "mixed"])
    parser.add_argument("--engine-args", default="", help="more of the server's, in one string")
    options = parser.parse_args()
    if options.model is None:
        subprocess.run([sys.executable, str(EXAMPLE / "make_data.py"), str(EXAMPLE)], check=True)
    machine = torch.cuda.get_device_name() if GPUS else f"{os.cpu_count()} cores"
    print(f"{options.requests} requests at any time, the longest {options.longest}; {machine}")
    print("| | tokens/s | limit | of the limit | ms a token, median | 99 of 100 |")
    print("|---|---|---|---|---|---|", flush=True)
    for way in options.ways:
        print(asyncio.run(measure(way, options)), flush=True)


async def measure(way: str, options: argparse.Namespace) -> str:
    """A row of the table."""
    os.environ["SLUICE_CUDA_GRAPH_MAX_BS"] = str(options.requests)  # as a job's engine has them
    port = free_port()
    room = str(options.requests * (PROMPT + options.longest // 2))
    passes, arguments = WAYS[way]
    os.environ["SLUICE_PREFILL_PASSES"] = str(passes)
    server = small_engine(
        options.model or EXAMPLE / "model",
        port,
        *["--load-format", "dummy", "--max-total-tokens", room, *arguments.split()],
        *options.engine_args.split(),
        way=f"{PATH}/launch_server.py",
        cpu=not GPUS,
    )
    try:
        async with Client(f"http://127.0.0.1:{port}") as engine:
            await engine.wait_ready(400)
            await equal(engine, options.requests)  # warms up
            limit = await equal(engine, options.requests)
            done = await refilled(engine, options)
    finally:
        server.terminate()
        server.wait(60)
    rate = done.tokens / options.seconds
    typical, slow = (1000 * value for value in quantiles(done.seconds))
    rates = f"{rate:,.0f} | {limit:,.0f} | {rate / limit:.0%}"
    return f"| {way} | {rates} | {typical:.1f} | {slow:.1f} |"


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """Median, and what 99 of 100 stay below."""
    cuts = statistics.quantiles(seconds, n=100)
    return cuts[49], cuts[98]


async def equal(engine: Client, requests: int) -> float:
    """Tokens a second of responses of one length that begin at once."""
    started = time.perf_counter()
    await asyncio.gather(*(generate(engine, prompt(), EQUAL) for _ in range(requests)))
    return requests * EQUAL / (time.perf_counter() - started)


async def refilled(engine: Client, options: argparse.Namespace) -> Done:
    """Keep the engine full; the responses that end within the seconds behind WARM_UP. Groups of
    GROUP have one prompt, and a group comes when as many responses have ended. The first ones are
    as long as the rest of a response that a full engine is busy with.
    """
    done, places = Done(), asyncio.Semaphore(options.requests)
    counted = time.perf_counter() + WARM_UP
    until = counted + options.seconds
    lengths = itertools.chain(begun(options), (drawn(options) for _ in itertools.count()))

    async def one(words: list[int], length: int) -> None:
        began = time.perf_counter()
        await generate(engine, words, length)
        ended = time.perf_counter()
        places.release()
        if counted <= ended < until:
            done.tokens += length
            done.seconds.append((ended - began) / length)

    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        while time.perf_counter() < until:
            for _ in range(GROUP):
                await places.acquire()
            words = prompt()
            tasks += [group.create_task(one(words, next(lengths))) for _ in range(GROUP)]
        for task in tasks:
            task.cancel()
    return done


def begun(options: argparse.Namespace) -> list[int]:
    """Tokens that are left of the requests of a full engine: a long one is met more often."""
    all_lengths = [drawn(options) for _ in range(10_000)]
    met = random.choices(all_lengths, weights=all_lengths, k=options.requests)
    return [max(int(length * random.random()), 1) for length in met]


def drawn(options: argparse.Namespace) -> int:
    """A response's length: every 50th is the longest."""
    longest: int = options.longest
    if random.random() < 0.02:
        return longest
    return min(max(int(random.lognormvariate(math.log(options.typical), 0.9)), 1), longest)


async def generate(engine: Client, words: list[int], length: int) -> None:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
    answer = await engine.generate(f"one-{next(_names)}", words, sampling)
    assert len(answer.tokens) == length


def prompt() -> list[int]:
    return random.choices(WORDS, k=PROMPT)


if __name__ == "__main__":
    main()
