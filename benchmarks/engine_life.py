"""Times to start and to end a small engine, by our script and as SGLang's own command, in turns.

    python benchmarks/engine_life.py [--rounds 3]

Ours looks ten times a second whether it has been told to end, and on a CPU forks the server's
processes instead of spawning them. Both serve the quickstart's model, on a GPU where there is one;
the end is that of an idle server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.processes import small_engine
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port

QUICKSTART = Path(__file__).parents[1] / "examples/quickstart"
GPUS = torch.cuda.device_count()
WAYS = {
    "SGLang's command": "-m sglang.launch_server",
    "sluice's script": f"{PATH}/launch_server.py",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    subprocess.run([sys.executable, str(QUICKSTART / "make_data.py"), str(QUICKSTART)], check=True)
    by_way: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    for _ in range(options.rounds):
        for name, way in WAYS.items():
            by_way[name].append(asyncio.run(life(way)))
    gpu = f" and a {torch.cuda.get_device_name()}" if GPUS else ""
    print(f"medians of {options.rounds} on {os.cpu_count()} cores{gpu}\n")
    print("| | start | seconds of a core | end |\n|---|---|---|---|")
    for name, lives in by_way.items():
        start, work, end = (statistics.median(numbers) for numbers in zip(*lives, strict=True))
        print(f"| {name} | {start:.1f} s | {work:.1f} | {end:.1f} s |")


async def life(way: str) -> tuple[float, float, float]:
    """Seconds until it is healthy, seconds of a core in all, seconds from SIGTERM to its end."""
    port, before = free_port(), _worked()
    started = time.monotonic()
    server = small_engine(
        QUICKSTART / "model", port, "--load-format", "dummy", way=way, cpu=not GPUS
    )
    try:
        async with Client(f"http://127.0.0.1:{port}") as engine:
            await server.ready(engine, 240)
        ready = time.monotonic()
        server.terminate()
        server.wait(60)
    finally:
        server.kill()
    return ready - started, _worked() - before, time.monotonic() - ready


def _worked() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
