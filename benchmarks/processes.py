"""Processes that several benchmarks start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sluice.engines.http.client import HttpClient

_ENGINE = "--host 127.0.0.1 --max-total-tokens 16384 --skip-server-warmup "
_ON_CPU = "--device cpu --attention-backend torch_native --dtype float32 --sleep-on-idle"
_ON_GPU = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none "
    "--mem-fraction-static 0.5"
)
_ENGINE_ENVIRONMENT = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_RANK_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}


def on_ranks(script: str, ranks: int, *arguments: str) -> int:
    """Run this script again, with what it was called with and `arguments`, as so many ranks. The
    exit code."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    return subprocess.run(
        [*launch, script, *sys.argv[1:], *arguments], env=os.environ | _RANK_ENVIRONMENT
    ).returncode


def sluice_run(
    manifest: Path,
    directory: Path,
    overrides: Sequence[str],
    seconds: float,
    variables: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code and output of `sluice run`. After `seconds` it is told to end, and gets 40 s for
    that; then it is killed. variables: of its environment."""
    command = [
        sys.executable,
        "-m",
        "sluice_cli",
        "run",
        str(manifest),
        "--plain",
        "--run-dir",
        str(directory),
    ]
    command += [word for override in overrides for word in ("--set", override)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | dict(variables or {}),
    )
    for signum, wait in ((signal.SIGINT, seconds), (signal.SIGKILL, 40.0)):
        try:
            output, _ = process.communicate(timeout=wait)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            process.send_signal(signum)
    output, _ = process.communicate(timeout=10)
    return process.returncode, output


class Server(subprocess.Popen[bytes]):
    """An engine's server; its output goes to a file without a name."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - the process' own, as long as it is
        super().__init__(
            command, env=os.environ | variables, stdout=self.output, stderr=subprocess.STDOUT
        )

    async def ready(self, engine: HttpClient, seconds: float) -> None:
        """Wait until it answers. Raises RuntimeError with its last words where it ends instead."""
        waiting = asyncio.create_task(engine.wait_ready(seconds))
        while not waiting.done():
            if self.poll() is not None:
                waiting.cancel()
                raise RuntimeError(f"the engine ended with {self.returncode}:\n{self.last_words()}")
            await asyncio.wait({waiting}, timeout=0.25)
        await waiting

    def last_words(self) -> str:
        """Return the end of its output."""
        output = self.output.fileno()  # its position is the server's
        size = os.fstat(output).st_size
        return os.pread(output, 4000, max(size - 4000, 0)).decode(errors="replace")


def small_engine(
    model: Path, port: int, *arguments: str, way: str = "-m sglang.launch_server", cpu: bool = True
) -> Server:
    """SGLang with the quickstart's settings, or a GPU's, started by python's `way`."""
    settings = (_ENGINE + (_ON_CPU if cpu else _ON_GPU)).split()
    return Server(
        [
            sys.executable,
            *way.split(),
            "--model-path",
            str(model),
            "--port",
            str(port),
            *settings,
            *arguments,
        ],
        _ENGINE_ENVIRONMENT | ({"SGLANG_USE_CPU_ENGINE": "1"} if cpu else {}),
    )
