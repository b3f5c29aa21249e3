"""How long a call of a weight update waits at an engine's HTTP process while many requests come.

    python benchmarks/overtaking.py [--requests 64 512 2048] [--seconds 15]

SGLang as it is, with our plugin (in_turn.py), and with requests that come many in one, as a worker
sends them (together.py), each with an engine of its own, one after the other. Another process sends
so many requests at once, waits for their answers and 0.2 s more, and does it again. The engine
refuses them (their temperature is negative), so that the HTTP process alone is at work. Meanwhile
its model_info is asked for, which needs nothing else, 0.05 s after each answer. *idle* is the same
without requests. A burst's seconds tell what the order costs requests.
The engine is the quickstart's, on a CPU: what is measured runs on one in any case.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import aiohttp

from benchmarks.processes import Server, small_engine
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.engines.sglang.request_batching import RequestBatcher
from sluice.runtime.pod_env import free_port

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart"
TOGETHER = "many in one"
WAYS = {
    "SGLang": "-m sglang.launch_server",
    "with the plugin": f"{PATH}/launch_server.py",
    TOGETHER: f"{PATH}/launch_server.py",
}
REFUSED = {
    "input_ids": [5] * 50,
    "sampling_params": {"temperature": -1.0, "max_new_tokens": 9},
    "return_logprob": True,
}
BETWEEN = 0.2
COLUMNS = ("requests at once", "median ms", "90 of 100", "most", "a burst, s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each row")
    options = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "make_data.py"), str(EXAMPLE)], check=True)
    print(f"{os.cpu_count()} cores\n\n| | {' | '.join(COLUMNS)} |\n{'|---' * 6}|", flush=True)
    for way, command in WAYS.items():
        port = free_port()
        arguments = ["--load-format", "dummy", "--log-level-http", "warning", "--enable-metrics"]
        server = small_engine(EXAMPLE / "model", port, *arguments, way=command)
        url = f"http://127.0.0.1:{port}"
        try:
            asyncio.run(ready(server, url))
            for count in (0, *options.requests):
                cells = measure(url, count, options.seconds, together=way == TOGETHER)
                print(f"| {way} | {' | '.join(cells)} |", flush=True)
        finally:
            server.terminate()
            server.wait(60)


def measure(url: str, count: int, seconds: float, *, together: bool) -> list[str]:
    """The cells of a row."""
    context = multiprocessing.get_context("spawn")
    bursts: SimpleQueue[float] = context.SimpleQueue()
    sender = context.Process(target=send, args=(url, count, bursts, together), daemon=True)
    if count:
        sender.start()
        bursts.get()  # warms up
    waits = asyncio.run(call_seconds(url, seconds))
    took = [bursts.get() for _ in range(3)] if count else []
    if count:
        sender.kill()
        sender.join()
    cuts = statistics.quantiles(waits, n=10)
    milliseconds = [f"{1e3 * value:.1f}" for value in (cuts[4], cuts[8], max(waits))]
    burst = f"{statistics.median(took):.2f}" if took else ""
    return [str(count) if count else "idle", *milliseconds, burst]


async def ready(server: Server, url: str) -> None:
    async with Client(url) as engine:
        await server.ready(engine, 400)


async def call_seconds(url: str, seconds: float) -> list[float]:
    """Seconds that each call took."""
    waits: list[float] = []
    until = time.perf_counter() + seconds
    async with aiohttp.ClientSession() as http:
        while time.perf_counter() < until:
            began = time.perf_counter()
            async with http.get(f"{url}/model_info") as answer:
                await answer.read()
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)
    return waits


def send(url: str, count: int, bursts: SimpleQueue[float], together: bool) -> None:
    """Bursts of requests, for ever; the seconds that each took."""
    asyncio.run(_send(url, count, bursts, together))


async def _send(url: str, count: int, bursts: SimpleQueue[float], together: bool) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        many = RequestBatcher(http, url)

        async def generate_once() -> None:
            if together:
                await many.ask(REFUSED)
                return
            async with http.post(f"{url}{Client.generate_path}", json=REFUSED) as answer:
                await answer.read()

        while True:
            began = time.perf_counter()
            await asyncio.gather(*(generate_once() for _ in range(count)))
            bursts.put(time.perf_counter() - began)
            await asyncio.sleep(BETWEEN)


if __name__ == "__main__":
    main()
