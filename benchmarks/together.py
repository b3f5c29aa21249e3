"""The work that short responses make for the process that takes requests, and how fast they come.

    python benchmarks/together.py [--model DIR] [--requests 512] [--tokens 8 32] [--rounds 5]
        [--seconds 4] [--engine-args "..."]

One engine with random weights; requests come each by itself (*alone*), or as a worker sends them to
an engine with our plugin (*many in one*), in turns. *at once*: so many, and again when all are
answered, as in a synchronous job. *refilled*: groups of eight with one prompt, each of which the
next one follows, as in an asynchronous job. *HTTP*, *client*: milliseconds of a core for a
response, of the server's first process and of this one. Without a GPU the quickstart's model is
served, on a CPU, where all processes share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import psutil

from benchmarks.full_engine import (
    GPUS,
    GROUP,
    add_options,
    begin_table,
    core_seconds,
    generate,
    prompt,
    spread,
    started,
    turns,
)
from sluice.engines.sglang.client import Client

COLUMNS = ("requests", "tokens", "load", "way", "responses/s", "HTTP, ms", "client, ms")


@dataclass(frozen=True, slots=True)
class Window:
    responses_a_second: float
    http: float
    # Milliseconds of a core for a response, of the server's first process and of this one.
    client: float


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind, for some seconds."""

    engine: Client
    requests: int
    tokens: int
    seconds: float

    async def at_once(self) -> int:
        """The number of responses."""
        until, responses = time.perf_counter() + self.seconds, 0
        while time.perf_counter() < until:
            await asyncio.gather(*(self.group() for _ in range(self.requests // GROUP)))
            responses += self.requests
        return responses

    async def refilled(self) -> int:
        until = time.perf_counter() + self.seconds

        async def groups() -> int:
            responses = 0
            while time.perf_counter() < until:
                responses += await self.group()
            return responses

        return sum(await asyncio.gather(*(groups() for _ in range(self.requests // GROUP))))

    async def group(self) -> int:
        words = prompt()
        await asyncio.gather(*(generate(self.engine, words, self.tokens) for _ in range(GROUP)))
        return GROUP


LOADS: dict[str, Callable[[Load], Awaitable[int]]] = {
    "at once": Load.at_once,
    "refilled": Load.refilled,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--requests", type=int, nargs="+", default=[512 if GPUS else 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32] if GPUS else [4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a way's turn")
    options = parser.parse_args()
    begin_table(COLUMNS, options.rounds, options.seconds)
    asyncio.run(measure(options))


async def measure(options: argparse.Namespace) -> None:
    """Print the table's rows."""
    async with started(options) as (server, together), Client(together.url) as alone:
        processes = (psutil.Process(server.pid), psutil.Process())
        ways = {"alone": alone, "many in one": together}  # alone has not learned that they can
        for requests, tokens, load in itertools.product(options.requests, options.tokens, LOADS):
            works = {
                way: partial(LOADS[load], Load(engine, requests, tokens, options.seconds))
                for way, engine in ways.items()
            }
            for way, windows in (await in_turns(works, options.rounds, processes)).items():
                print(f"| {requests} | {tokens} | {load} | {way} | {row(windows)} |", flush=True)


async def in_turns(
    works: Mapping[str, Callable[[], Awaitable[int]]],
    rounds: int,
    processes: tuple[psutil.Process, ...],
) -> dict[str, list[Window]]:
    """By way. Each has a turn that warms up before."""
    for work in works.values():
        await work()
    windows: dict[str, list[Window]] = {way: [] for way in works}
    for way in turns([*works], rounds):
        windows[way].append(await one_turn(works[way](), processes))
    return windows


async def one_turn(work: Awaitable[int], processes: tuple[psutil.Process, ...]) -> Window:
    def seconds() -> list[float]:
        return [time.perf_counter(), *core_seconds(*processes)]

    before = seconds()
    responses = await work
    took, http, client = (after - first for after, first in zip(seconds(), before, strict=True))
    return Window(responses / took, 1e3 * http / responses, 1e3 * client / responses)


def row(windows: list[Window]) -> str:
    cells = [spread([window.responses_a_second for window in windows])]
    for name in ("http", "client"):
        cells.append(f"{statistics.median(getattr(window, name) for window in windows):.2f}")
    return " | ".join(cells)


if __name__ == "__main__":
    main()
