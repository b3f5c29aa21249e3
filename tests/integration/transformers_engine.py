"""The engine transformers, as a rollout pod starts it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sluice.engines.transformers import Transformers
from sluice.runtime.pod_env import free_port
from tests.integration.engines import call, until, with_us

_READY_SECONDS = 120.0


class TransformersServer:
    """A server that has read the weights of `model`."""

    engine = Transformers()

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        self.model, self.log, self.port = model, log, free_port()
        self.url, self.address = f"http://127.0.0.1:{self.port}", f"127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "sluice.engines.transformers.server"]
        command += ["--model-path", str(model), "--port", str(self.port), *arguments]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                with_us(*command),
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the engine ended:\n{self.log.read_text()[-3000:]}"
            try:
                return call(self.url + "/health", timeout=5)[0] == 200
            except OSError:
                return False

        until(ready, _READY_SECONDS, "the engine is ready")

    def load_weights(self, model: Path, version: str, *, flush: bool = True) -> None:
        status, answer = call(self.url + "/load", {"path": str(model), "version": version})
        assert status == 200, answer

    def update(self, mode: str, model: Path, version: str) -> None:
        """Pause, bring other weights, continue: what a trainer does to an engine."""
        assert call(self.url + "/pause", {"mode": mode})[0] == 200
        self.load_weights(model, version)
        assert call(self.url + "/resume", {})[0] == 200

    def reset(self, version: str = "0") -> None:
        """Idle, not paused, no update open, the first weights, under this name."""
        assert call(self.url + "/pause", {"mode": "abort"})[0] == 200
        assert call(self.url + "/begin", {})[0] == 200
        self.load_weights(self.model, version)
        assert call(self.url + "/resume", {})[0] == 200

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def info(self) -> dict[str, Any]:
        answer: dict[str, Any] = call(self.url + "/info")[1]
        return answer

    def metric(self, name: str) -> float:
        lines = call(self.url + "/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def generated(self, tokens: int) -> None:
        """Wait until so many more tokens have been generated."""
        name = "sluice_engine_generated_tokens_total"
        before = self.metric(name)
        enough = lambda: self.metric(name) - before >= tokens  # noqa: E731
        await asyncio.to_thread(until, enough, 20.0, f"{tokens} tokens")

    async def idle(self, seconds: float) -> None:
        idle = lambda: self.info()["running"] == 0  # noqa: E731
        await asyncio.to_thread(until, idle, seconds, "the engine is idle")

    def kill(self) -> None:
        if self.process.poll() is not None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait(20)
