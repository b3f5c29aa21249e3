"""The processes of benchmarks/weight_sync.py: engines, the rendezvous, and what runs in ranks."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.weight_sync_source import GPUS
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_operator.cluster.local.gpus import visible_gpus
from sluice_operator.cluster.local.translate import NVLINK

ROOT = Path(__file__).parents[1]
SOURCE, BARE = "benchmarks.weight_sync_source", "benchmarks.weight_sync_bare"
GPU_ARGUMENTS = "--attention-backend triton --sampling-backend pytorch --grammar-backend none"
CPU_ARGUMENTS = (
    "--device cpu --attention-backend torch_native --max-total-tokens 4096 --sleep-on-idle"
)

# Versions of an adapter that an engine holds with --pause-mode versions: two updates old at most.
VERSIONS = 3
# An engine that compiles kernels for several GPUs takes minutes.
READY_SECONDS = 600


@contextmanager
def rendezvous(directory: Path) -> Iterator[str]:
    port = free_port()
    env = os.environ | {
        "SLUICE_BIND": "127.0.0.1",
        "SLUICE_PORT_GRPC": str(port),
        "SLUICE_PORT_METRICS": "0",
    }
    with process([sys.executable, "-m", "sluice_rendezvous"], env, directory / "rendezvous.log"):
        yield f"127.0.0.1:{port}"


@contextmanager
def engine(options: argparse.Namespace, number: int, directory: Path) -> Iterator[str]:
    """An SGLang server; its address once its weights may be updated."""
    port = free_port()
    command = (
        f"{sys.executable} {PATH}/launch_server.py --model-path {directory} --load-format "
        f"dummy --port {port}"
    )
    command += (
        " --skip-tokenizer-init --skip-server-warmup --mem-fraction-static 0.6 --host 127.0.0.1"
    )
    command += f" --tp-size {options.engine_gpus} " + (GPU_ARGUMENTS if GPUS else CPU_ARGUMENTS)
    command += " --disable-cuda-graph" if GPUS and not options.load else ""
    command += f" {options.engine_args}"
    versions = VERSIONS if options.pause_mode == "versions" else 0
    if versions:
        command += (
            f" --enable-lora --max-lora-rank {options.lora_rank} --lora-target-modules all "
            f"--max-loras-per-batch {VERSIONS + 1}"
        )
        command += "" if GPUS else " --lora-backend torch_native"
    env = os.environ | {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "HF_HUB_OFFLINE": "1"}
    if options.lora_rank:
        adapter = {"rank": options.lora_rank, "versions": versions, "layers": ["all-linear"]}
        env["SLUICE_LORA"] = json.dumps(adapter)
    if GPUS and options.load:
        # An update waits for the step that is being decoded, which graphs make as short as a job's.
        env["SLUICE_CUDA_GRAPH_MAX_BS"] = str(options.load)
    first = options.sources + number * options.engine_gpus
    gpus = [(first + offset) % GPUS for offset in range(options.engine_gpus)] if GPUS else []
    env |= visible(gpus) if GPUS else {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    with process(command.split(), env, directory / f"engine-{number}.log"):
        yield f"127.0.0.1:{port}"


def engine_member(number: int, address: str, gpus: int) -> pb.Member:
    """An engine as its worker presents it, with no weights yet."""
    return pb.Member(
        role="rollout",
        name=f"rollout-{number}",
        attempt=1,
        address=address,
        world_size=gpus,
        version=-1,
    )


async def with_members(
    address: str, servers: list[str], options: argparse.Namespace, directory: Path
) -> None:
    """Join the engines, as the workers beside them do, while the sources measure. Raises SystemExit
    where engines that were sent the same weights do not answer alike.
    """
    busy: list[asyncio.Task[None]] = []
    clients: list[Client] = []
    answers: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for number, server in enumerate(servers):
            client = await stack.enter_async_context(Client(f"http://{server}"))
            clients.append(client)
            for _ in range(2 * READY_SECONDS):
                if (await client.health(timeout=5.0))[0]:
                    break
                await asyncio.sleep(0.5)
            else:
                log = directory / f"engine-{number}.log"
                raise SystemExit(
                    f"error: engine {number} is not ready after {READY_SECONDS} s:\n"
                    f"{log.read_text()[-3000:]}"
                )
            hello = partial(engine_member, number, server, options.engine_gpus)
            membership = await stack.enter_async_context(Membership(address, hello))
            await membership.connected.wait()
            for request in range(options.load):
                busy.append(asyncio.create_task(keep_busy(client, request)))
        env = {"SLUICE_RENDEZVOUS": address}
        gpus = list(range(options.sources))
        for attempt, way in enumerate(options.fan_out.split(","), 1):
            arguments = [str(directory), way, str(attempt)]
            await asyncio.to_thread(run_ranks, SOURCE, arguments, options.sources, gpus, env)
            checked = clients if options.check else []
            for number, said in enumerate(await asyncio.gather(*map(answer, checked))):
                answers[f"{way}, engine {number}"] = said
        for task in busy:
            task.cancel()
    for place, said in answers.items():
        print(f"log-probs of the weights, {place}: {said}")
    if len(set(answers.values())) > 1:
        raise SystemExit("error: engines with the same weights do not answer alike")


async def answer(client: Client) -> str:
    """The sum of an engine's log-probs of 32 tokens, which tells other weights by other digits."""
    prompt = [(i * 104729) % 2000 + 10 for i in range(64)]
    sampling = {"max_new_tokens": 32, "ignore_eos": True, "temperature": 0.0}
    return f"{sum((await client.generate('answer', prompt, sampling)).log_probs):.6f}"


async def keep_busy(client: Client, number: int) -> None:
    """One request after another, of 256 tokens and up to 2,000 more."""
    for again in itertools.count():
        prompt = [(number * 7919 + i * 104729) % 2000 + 10 for i in range(256)]
        await client.generate(
            f"{number}-{again}", prompt, {"max_new_tokens": 2000, "ignore_eos": True}
        )


def run_ranks(
    module: str,
    arguments: Sequence[str],
    processes: int,
    gpus: list[int],
    extra: dict[str, str] | None = None,
) -> None:
    """Run a module in so many ranks, each of which sees these GPUs. Raises CalledProcessError."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(free_port()), "-m", module, *arguments]
    env = os.environ | NVLINK | (extra or {}) | (visible(gpus) if GPUS else {})
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=900)


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """The variable with which a process sees these of our GPUs."""
    ours = visible_gpus()
    return {"CUDA_VISIBLE_DEVICES": ",".join(ours[gpu] for gpu in gpus)}


@contextmanager
def process(command: list[str], env: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(child.pid, 9)
        child.wait(30)
