"""Tokens a second of an engine that is kept full, as an asynchronous job keeps it: wherever a
response ends, the next prompt comes. By the rule that prompts wait for each other with.

    python benchmarks/refill.py [--model DIR] [--requests 512] [--lengths short long-tailed]
        [--longest 4000] [--rules none tenth places] [--rounds 4] [--seconds 5]
        [--engine-args "..."]

Lengths and rules are waiting.py's, which computes what is measured here. One engine with random
weights serves all: the rules take turns while it is full, and it counts its own tokens. *running*:
requests that a token was made of at once; the others waited, or were on their way. *prompts*: the
share of passes that had prompts. *HTTP*, *client*: what the process that takes requests, and this
one, need of a core. SGLang's own way to run a prompt beside the others is `--rules none
--engine-args=--enable-mixed-chunk`. Without a GPU the quickstart's model is served, on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import operator
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import psutil

from benchmarks.full_engine import (
    GPUS,
    GROUP,
    PROMPT,
    add_options,
    begin_table,
    core_seconds,
    generate,
    prompt,
    spread,
    started,
    turns,
)
from benchmarks.refill_plugin import COUNTS, FILE_VARIABLE, install, shared
from benchmarks.waiting import LENGTHS, RULES, Draw, begun
from sluice.engines.sglang.client import Client

# Tokens of each of the first responses.
WARM_UP_TOKENS = 128 if GPUS else 24
# Tokens of a request, on average, that the engine has memory for.
ROOM = 2048 if GPUS else 256
FILLING_SECONDS = 5.0
# Seconds of a turn that pass before it counts.
SETTLING_SECONDS = 0.5
COLUMNS = (
    *("requests", "lengths", "rule", "tokens/s", "ms a token", "running"),
    *("prompts", "HTTP", "client"),
)


@dataclass(frozen=True, slots=True)
class Window:
    """Work of an engine in some seconds by one rule."""

    tokens_a_second: float
    # From one token of a response to its next, on average.
    token_seconds: float
    # Requests that a token was made of at once, on average.
    running: float
    # Share of the passes that had prompts.
    prompts: float
    # Share of a core that the server's first process was at work.
    http: float
    # Share of a core that this process was at work.
    client: float


@dataclass(frozen=True, slots=True)
class Meter:
    """Numbers of the engine and of this process. counts: as the plugin has them."""

    counts: mmap
    server: psutil.Process
    client: psutil.Process

    def begin(self, rule: str) -> None:
        turn = COUNTS.unpack(self.counts)[0] + 1
        COUNTS.pack_into(self.counts, 0, turn, [*RULES].index(rule), 0, 0, 0)

    def read(self) -> tuple[float, ...]:
        """Seconds by the clock; tokens; passes that made them; passes with prompts; seconds of a
        core, of the server and of this process.
        """
        worked = core_seconds(self.server, self.client)
        return time.perf_counter(), *COUNTS.unpack(self.counts)[2:], *worked


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--requests", type=int, nargs="+", default=[512 if GPUS else 32])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=["short", "long-tailed"])
    parser.add_argument("--longest", type=int, default=4000 if GPUS else 50, help="no longer one")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["none", "tenth", "places"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a rule's turn")
    options = parser.parse_args()
    begin_table(COLUMNS, options.rounds, options.seconds)
    with tempfile.TemporaryDirectory() as directory:
        variables = install(Path(directory))
        asyncio.run(measure(options, variables, shared(Path(variables[FILE_VARIABLE]))))


async def measure(options: argparse.Namespace, variables: dict[str, str], counts: mmap) -> None:
    """Print the table's rows."""
    os.environ["SLUICE_PREFILL_PASSES"] = "0"  # the benchmark's plugin stands for gather.py
    os.environ.update(variables)
    room = str(max(options.requests) * (PROMPT + ROOM))
    async with started(options, "--max-total-tokens", room) as (server, engine):
        meter = Meter(counts, psutil.Process(server.pid), psutil.Process())
        for requests in options.requests:
            await warm_up(engine, requests, meter)
            for name in options.lengths:
                draw = shortened(LENGTHS[name], options.longest)
                windows = await in_turns(engine, requests, draw, options, meter)
                for rule, its_windows in windows.items():
                    cells = row(its_windows)
                    print(f"| {requests} | {name} | {rule} | {cells} |", flush=True)


def shortened(draw: Draw, longest: int) -> Draw:
    return lambda chance: min(draw(chance), longest)


def row(windows: list[Window]) -> str:
    def median(name: str) -> float:
        return statistics.median(getattr(window, name) for window in windows)

    cells = [
        spread([window.tokens_a_second for window in windows]),
        f"{1000 * median('token_seconds'):.1f}",
        f"{median('running'):.0f}",
        *(f"{median(share):.0%}" for share in ("prompts", "http", "client")),
    ]
    return " | ".join(cells)


async def warm_up(engine: Client, requests: int, meter: Meter) -> None:
    """Responses of one length that begin at once, twice. Fails where the engine counts others."""
    expected = requests * WARM_UP_TOKENS
    for _ in range(2):
        before = meter.read()
        await asyncio.gather(*(generate(engine, prompt(), WARM_UP_TOKENS) for _ in range(requests)))
        counted = meter.read()[1] - before[1]
        assert abs(counted / expected - 1) < 0.02, f"{counted} tokens counted, not {expected}"


async def in_turns(
    engine: Client, requests: int, draw: Draw, options: argparse.Namespace, meter: Meter
) -> dict[str, list[Window]]:
    """Keep the engine full, and let the rules take turns, every second time in reverse order."""
    filling = asyncio.create_task(keep_full(engine, requests, draw))
    windows: dict[str, list[Window]] = defaultdict(list)
    try:
        await asyncio.wait({filling}, timeout=FILLING_SECONDS)
        for rule in turns(options.rules, options.rounds):
            windows[rule].append(await one_turn(rule, options.seconds, filling, meter))
    finally:
        filling.cancel()
        await asyncio.wait({filling})
        await engine.abort()
    return windows


async def one_turn(rule: str, seconds: float, filling: asyncio.Task[None], meter: Meter) -> Window:
    """Raises what the task that keeps the engine full has ended with."""
    meter.begin(rule)
    await asyncio.wait({filling}, timeout=SETTLING_SECONDS)
    before = meter.read()
    await asyncio.wait({filling}, timeout=seconds)
    after = meter.read()
    if filling.done():
        filling.result()
    took, tokens, passes, prompts, http, client = map(operator.sub, after, before)
    passes = max(passes, 1)
    return Window(
        tokens_a_second=tokens / took,
        token_seconds=took / passes,
        running=tokens / passes,
        prompts=prompts / (passes + prompts),
        http=http / took,
        client=client / took,
    )


async def keep_full(engine: Client, requests: int, draw: Draw) -> None:
    """Groups of GROUP have one prompt, and a group comes when as many responses have ended. The
    first ones are as long as the rest of a response that a full engine is busy with.
    """
    chance, places = random.Random(0), asyncio.Semaphore(requests)
    first = begun(chance, draw, requests)
    lengths = itertools.chain(first, (draw(chance) for _ in itertools.count()))

    async def generate_words(words: list[int], length: int) -> None:
        await generate(engine, words, length)
        places.release()

    async with asyncio.TaskGroup() as group:
        while True:
            for _ in range(GROUP):
                await places.acquire()
            words = prompt()
            for _ in range(GROUP):
                group.create_task(generate_words(words, next(lengths)))


if __name__ == "__main__":
    main()
