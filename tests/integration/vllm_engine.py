"""A real vLLM server, out of the environment that `make vllm` makes, with our plugin."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from sluice.api import RLJob
from sluice.engines.protocol import ServerPlacement
from sluice.engines.vllm import Vllm
from sluice.engines.vllm.launch import Launch
from sluice.engines.vllm.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port
from tests.integration.engines import call, until, with_us

PYTHON = Path(
    os.environ.get("SLUICE_VLLM_PYTHON") or Path(sys.prefix).parent / ".venv-vllm/bin/python"
)
_READY_SECONDS = 240.0
_LAUNCH = Launch()


class VllmServer:
    """vLLM as a rollout pod starts it, with all its processes in one new session."""

    engine = Vllm()

    def __init__(
        self,
        model: Path,
        log: Path,
        *arguments: str,
        sampling: Any = None,
        groups: Any = None,
        **variables: str,
    ) -> None:
        """sampling, groups: of the job that it serves, in the words of its manifest."""
        self.model, self.log, self.port = model, log, free_port()
        self.url, self.address = f"http://127.0.0.1:{self.port}", f"127.0.0.1:{self.port}"
        spec = RLJob.model_validate(_job(model, sampling or {}, groups or {})).spec
        command = [sys.executable, str(PATH / "launch_server.py")]
        command += _LAUNCH.args(spec, ServerPlacement(str(model), "127.0.0.1", str(self.port), "0"))
        self.command = " ".join(command)
        environment = {
            **os.environ,
            **_LAUNCH.env(spec),
            "HF_HUB_OFFLINE": "1",
            "SLUICE_VLLM_PYTHON": str(PYTHON),
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                with_us(*command, *arguments),
                env=environment | variables,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"vLLM ended:\n{self.log.read_text()[-3000:]}"
            try:
                return call(self.url + "/health", timeout=5)[0] == 200
            except OSError:
                return False

        until(ready, _READY_SECONDS, "vLLM is ready")

    def rpc(self, method: str, **arguments: Any) -> tuple[int, Any]:
        return call(self.url + "/collective_rpc", {"method": method, "kwargs": arguments})

    def load_weights(self, model: Path, version: str, *, flush: bool = True) -> None:
        """flush: also empty the prefix cache, from under what runs."""
        status, answer = self.rpc("sluice_load", path=str(model))
        assert status == 200, answer
        assert call(self.url + "/update_weight_version", {"new_version": version})[0] == 200
        if flush:
            path = "/reset_prefix_cache?reset_running_requests=true"
            assert call(self.url + path, {})[1] == {"success": True}

    def reset(self, version: str = "0") -> None:
        """Idle, not paused, no update open, an empty cache, the first weights, under this name."""
        assert call(self.url + "/pause?mode=abort&clear_cache=true", {})[0] == 200
        self.load_weights(self.model, version)
        assert call(self.url + "/resume", {})[0] == 200

    def update(self, mode: str, model: Path, version: str) -> None:
        """Pause, bring other weights, continue: what a trainer does to an engine."""
        how = "mode=abort" if mode == "abort" else "mode=keep"
        assert call(f"{self.url}/pause?{how}&clear_cache=true", {})[0] == 200
        self.load_weights(model, version)
        assert call(self.url + "/resume", {})[0] == 200

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def part(self, name: str) -> psutil.Process:
        """Return one of the engine's processes: EngineCore (the scheduler), Worker."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if f"VLLM::{name}" in " ".join(child.cmdline()))

    def metric(self, name: str) -> float:
        lines = call(self.url + "/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    async def generated(self, tokens: int) -> None:
        """Wait until so many more tokens have been generated."""
        before = self.metric("generation_tokens_total")
        enough = lambda: self.metric("generation_tokens_total") - before >= tokens  # noqa: E731
        await asyncio.to_thread(until, enough, 20.0, f"{tokens} tokens")

    async def idle(self, seconds: float) -> None:
        idle = lambda: self.metric("num_requests_running") == 0  # noqa: E731
        await asyncio.to_thread(until, idle, seconds, "the engine is idle")

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait(20)


def _job(model: Path, sampling: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"prompts": [{"path": "prompts.jsonl"}]},
        "rollout": {
            "engine": "vllm",
            "gpusPerReplica": 0,
            "batchSize": 1,
            "samplesPerPrompt": 2,
            "sampling": sampling,
        },
        "reward": {"type": "exact_match"},
        "trainer": {"gpusPerNode": 0, "steps": 1},
        "checkpoint": {"ephemeral": True},
    }
    spec |= {name: spec.get(name, {}) | fields for name, fields in groups.items()}
    return {"metadata": {"name": "vllm"}, "spec": spec}
