"""Cost of SGLang's Python for a mixture's weights: each expert's tensors by themselves, and all of
a layer stacked.

    python benchmarks/expert_loading.py [--layers 48] [--experts 128] [--updates 5]

A real SGLang server with our plugin serves a model with as many layers and experts as
Qwen3-30B-A3B, but so narrow that copying is nothing. It gets its weights through shared memory
(CPU) or CUDA IPC (GPU), in one bucket, first the one way, then the other. `load`: SGLang's
`load_weights` alone, timed in the engine by a second plugin; `cpu`: its thread's time on a core,
which other work on the machine changes little; `update`: the whole call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch

from benchmarks.shapes import write_config
from sluice.engines.plugin_common.install import install
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.control import Control
from sluice.engines.sglang.layout import Layout
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.ipc import Ipc
from sluice_trainer.weights.transport import Peer

GPU = torch.cuda.is_available()
HIDDEN, WIDTH = 64, 32
CPU_ARGUMENTS = (
    "--device cpu --attention-backend torch_native --dtype float32 --max-total-tokens 4096 "
    "--sleep-on-idle"
)
GPU_ARGUMENTS = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none "
    "--disable-cuda-graph"
)
CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
CLOCK = """
import time

def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    name = "sglang.srt.models.qwen3_moe.Qwen3MoeForCausalLM.load_weights"
    HookRegistry.register(name, timed, HookType.AROUND)

def timed(original, *args, **kwargs):
    started = time.perf_counter(), time.thread_time()
    result = original(*args, **kwargs)
    with open("{file}", "w") as out:
        print(time.perf_counter() - started[0], time.thread_time() - started[1], file=out)
    return result
"""
Tensors = list[tuple[str, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        changes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
        shape = {
            "num_hidden_layers": options.layers,
            "num_experts": options.experts,
            "num_experts_per_tok": 8,
        }
        write_config(directory, "tiny-moe", "bfloat16" if GPU else "float32", **changes, **shape)
        with server(directory) as address:
            costs = asyncio.run(measure(address, options, directory / "seconds"))
    where = (
        torch.cuda.get_device_name() if GPU else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    )
    print(
        f"{options.layers} layers of {options.experts} experts, {HIDDEN} wide, {where}; medians of "
        f"{options.updates}"
    )
    print(f"{'':>16} {'tensors':>8} {'load s':>8} {'cpu s':>8} {'update s':>9}")
    for kind, (count, load, cpu, update) in costs.items():
        print(f"{kind:>16} {count:>8} {load:>8.3f} {cpu:>8.3f} {update:>9.3f}")
    counts, loads, cpus, updates = ((a / b) for a, b in zip(*costs.values(), strict=True))
    print(f"{'ratio':>16} {counts:>8.0f} {loads:>8.0f} {cpus:>8.0f} {updates:>9.1f}")


@contextmanager
def server(directory: Path) -> Iterator[str]:
    """The engine with both plugins; its address."""
    plugins, port = directory / "plugins", free_port()
    install(PATH, plugins)
    (plugins / "clock.py").write_text(CLOCK.replace("{file}", str(directory / "seconds")))
    (plugins / "clock-1.dist-info").mkdir()
    (plugins / "clock-1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: clock\nVersion: 1\n"
    )
    (plugins / "clock-1.dist-info/entry_points.txt").write_text(
        "[sglang.srt.plugins]\nclock = clock:register\n"
    )
    command = (
        f"{sys.executable} {plugins}/launch_server.py --model-path {directory} --load-format dummy "
        f"--port {port} "
    )
    command += "--host 127.0.0.1 --skip-tokenizer-init --skip-server-warmup " + (
        GPU_ARGUMENTS if GPU else CPU_ARGUMENTS
    )
    env = {**os.environ, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "HF_HUB_OFFLINE": "1"}
    with (directory / "log").open("wb") as log:
        child = subprocess.Popen(
            command.split(),
            env=env | ({} if GPU else CPU_ENV),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        asyncio.run(ready(port, directory / "log"))
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(child.pid, 9)
        child.wait(30)


async def ready(port: int, log: Path) -> None:
    async with Client(f"http://127.0.0.1:{port}") as engine:
        for _ in range(600):
            if (await engine.health(timeout=5.0))[0]:
                return
            await asyncio.sleep(0.5)
    raise SystemExit(f"error: the engine is not ready after 300 s:\n{log.read_text()[-3000:]}")


async def measure(
    address: str, options: argparse.Namespace, clock: Path
) -> dict[str, tuple[float, ...]]:
    """By kind of tensors: how many there are; seconds of load_weights, of its thread on a core, of
    the update."""
    costs = {}
    async with aiohttp.ClientSession() as session:
        control = Control(address, session, 300.0, "benchmark/1")
        await control.learn()
        await control.pause("in_place")
        for kind, tensors in (("single experts", single(options)), ("stacked", stacked(options))):
            updates = [await update(control, tensors, clock) for _ in range(1 + options.updates)][
                1:
            ]
            costs[kind] = (
                len(tensors),
                *(statistics.median(seconds) for seconds in zip(*updates, strict=True)),
            )
    return costs


async def update(control: Control, tensors: Tensors, clock: Path) -> list[float]:
    [bucket] = buckets(tensors, 1 << 40, Layout())
    transport, peer = Ipc(), Peer("engine", 1, 1, 1, control)
    await control.begin()
    await transport.stage(bucket, 1)
    started = time.perf_counter()
    await transport.send(peer, bucket, 1, flush=False)
    seconds = time.perf_counter() - started
    await control.end()
    return [*map(float, clock.read_text().split()), seconds]


def single(options: argparse.Namespace) -> Tensors:
    """The experts' tensors under the names of a checkpoint."""
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return [
        (f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight", random(*shape))
        for layer in range(options.layers)
        for expert in range(options.experts)
        for kind, shape in shapes.items()
    ]


def stacked(options: argparse.Namespace) -> Tensors:
    """The same as the trainer sends them."""
    shapes = {"w13_weight": (2 * WIDTH, HIDDEN), "w2_weight": (HIDDEN, WIDTH)}
    return [
        (f"model.layers.{layer}.mlp.experts.{kind}", random(options.experts, *shape))
        for layer in range(options.layers)
        for kind, shape in shapes.items()
    ]


def random(*shape: int) -> torch.Tensor:
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if GPU else {}
    return torch.randn(*shape, **kind)


if __name__ == "__main__":
    main()
