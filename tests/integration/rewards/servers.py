"""HTTP servers for remote rewards, with faults on request."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port
from tests.integration.engines import call, until, with_us


class Server:
    """Answers POSTs to `path` with `answer(body)`, after faults: a status or seconds of silence."""

    def __init__(self, path: str, answer: Callable[[Any], Any], faults: list[int | float]) -> None:
        self.path, self.answer, self.faults = path, answer, list(faults)
        self.seen: list[Any] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(await request.json())
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, int):
                return web.Response(status=fault, text="fault")
            await asyncio.sleep(fault)
        answer = self.answer(self.seen[-1])
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


@asynccontextmanager
async def serving(
    answer: Callable[[Any], Any], *faults: float, path: str = "/"
) -> AsyncIterator[Server]:
    server = Server(path, answer, list(faults))
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post(path, server.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def save_reward_model(directory: Path, base: Path) -> Path:
    """Save a Qwen3 model with random weights, a head of one output, and the tokenizer of `base`."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config.from_pretrained(
        base, num_labels=1, architectures=["Qwen3ForSequenceClassification"]
    )
    torch.manual_seed(3)
    Qwen3ForSequenceClassification(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


@contextmanager
def reward_model_server(model: Path, log: Path) -> Iterator[str]:
    """Run SGLang with a reward model on the CPU, and yield its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = (
        f"{sys.executable} {PATH}/launch_server.py --model-path {model} --host 127.0.0.1 --port "
        f"{port} --is-embedding --dtype float32 --skip-server-warmup --device cpu "
        "--attention-backend torch_native --disable-radix-cache --max-total-tokens 32768 "
        "--sleep-on-idle"
    )
    environment = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            with_us(*command.split()),
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def ready() -> bool:
        assert process.poll() is None, f"SGLang ended:\n{log.read_text()[-3000:]}"
        try:
            return call(url + "/health", timeout=5)[0] == 200
        except OSError:
            return False

    try:
        until(ready, 280, "SGLang is ready")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
