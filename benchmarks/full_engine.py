"""An engine with random weights that a benchmark keeps full: how it is started, what it is asked.

Without a GPU it serves the quickstart's model, on a CPU.
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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import torch

from benchmarks.processes import Server, small_engine
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port

GPUS = torch.cuda.device_count()
# Responses of a prompt.
GROUP = 8
PROMPT = 48 if GPUS else 8
_EXAMPLE = Path(__file__).parents[1] / "examples" / ("throughput" if GPUS else "quickstart")
_WORDS = range(3, 13)  # both examples' tokenizers have these
_READY_SECONDS = 400
_END_SECONDS = 60
_names = itertools.count()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that all such benchmarks have."""
    parser.add_argument("--model", type=Path)
    parser.add_argument("--engine-args", default="", help="more of the server's, in one string")


def begin_table(columns: tuple[str, ...], rounds: int, seconds: float) -> None:
    machine = torch.cuda.get_device_name() if GPUS else f"{os.cpu_count()} cores"
    print(f"median (least to most) of {rounds} turns of {seconds:g} s; {machine}")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)


@asynccontextmanager
async def started(
    options: argparse.Namespace, *arguments: str
) -> AsyncIterator[tuple[Server, Client]]:
    """The server, which is ready, and a worker's client of it. arguments: of the server."""
    if options.model is None:
        command = [sys.executable, str(_EXAMPLE / "make_data.py"), str(_EXAMPLE)]
        await asyncio.to_thread(subprocess.run, command, check=True)
    os.environ["SLUICE_CUDA_GRAPH_MAX_BS"] = str(max(options.requests))  # as a job's engine has
    port = free_port()
    server = small_engine(
        options.model or _EXAMPLE / "model",
        port,
        *["--load-format", "dummy", *arguments, *options.engine_args.split()],
        way=f"{PATH}/launch_server.py",
        cpu=not GPUS,
    )
    try:
        async with Client(f"http://127.0.0.1:{port}") as engine:
            await server.ready(engine, _READY_SECONDS)
            yield server, engine
    finally:
        server.terminate()
        server.wait(_END_SECONDS)


def turns(ways: Sequence[str], rounds: int) -> Iterator[str]:
    """Each way's turn in each round, every second time in reverse order."""
    for number in range(rounds):
        yield from ways if number % 2 == 0 else reversed(ways)


def core_seconds(*processes: psutil.Process) -> list[float]:
    """Seconds of a core that each of them has needed so far."""
    return [times.user + times.system for times in (process.cpu_times() for process in processes)]


def spread(rates: Sequence[float]) -> str:
    """The median, the least and the most."""
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def prompt() -> list[int]:
    return random.choices(_WORDS, k=PROMPT)


async def generate(engine: Client, words: list[int], length: int) -> None:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
    answer = await engine.generate(f"one-{next(_names)}", words, sampling)
    assert len(answer.tokens) == length
