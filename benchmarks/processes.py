"""Processes that several benchmarks start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ENGINE = (
    "--host 127.0.0.1 --device cpu --attention-backend torch_native --dtype float32 --max-total-tokens 16384 "
    "--sleep-on-idle --skip-server-warmup"
)
_ENGINE_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_RANK_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}


def on_ranks(script: str, ranks: int, *arguments: str) -> int:
    """Run this script again, with what it was called with and `arguments`, as so many ranks. The exit code."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run([*launch, script, *sys.argv[1:], *arguments], env=os.environ | _RANK_ENVIRONMENT).returncode


def cpu_engine(
    model: Path, port: int, *arguments: str, way: str = "-m sglang.launch_server"
) -> subprocess.Popen[bytes]:
    """SGLang on the CPU with the quickstart's settings, started by python's `way`."""
    command = [sys.executable, *way.split(), "--model-path", str(model), "--port", str(port), *_ENGINE.split()]
    return subprocess.Popen(
        [*command, *arguments],
        env=os.environ | _ENGINE_ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
