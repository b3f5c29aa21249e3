"""A weight update from the trainer's GPUs to SGLang engines, phase by phase, beside a bare
broadcast of the same bytes.

    python benchmarks/weight_sync.py --shape qwen3-4b [--sources 1] [--engines 1]
        [--fan-out direct,chain] [--buckets 1024,4096] [--out DIR]

Everything but the workers and the optimizer is what a job runs: Megatron's model, gather and
conversion, the rendezvous process, the update protocol, SGLang servers with our plugin and random
weights. The first update, which also makes the communicators, is printed apart. `bare` is one
broadcast of as many bytes between the same two GPUs, with nothing else. GPUs are taken in order:
first the sources', then the engines', then the first ones once more (a chain alone reaches an
engine that shares its source's GPU: NCCL connects no GPU with itself). With several ways to fan
out, each is measured by sources of its own, at the same engines. Without a GPU a tiny model goes
over gloo: a rehearsal.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fan_out import ENGINES, chain, direct
from benchmarks.shapes import SHAPES, write_config
from sluice.api import RLJobSpec
from sluice.engines.sglang.generate import Client
from sluice.engines.sglang.layout import Layout
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.environment import Environment, free_port, read
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_operator.cluster.local.gpus import visible_gpus
from sluice_operator.cluster.local.inherited import NVLINK
from sluice_trainer.huggingface_config import read_shape

GPUS = torch.cuda.device_count()
PHASES = ("prepare", "pause", "transfer", "verify", "resume", "paused")
GPU_ARGUMENTS = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none "
    "--disable-cuda-graph"
)
CPU_ARGUMENTS = (
    "--device cpu --attention-backend torch_native --max-total-tokens 4096 --sleep-on-idle"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b" if GPUS else "tiny")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to save time")
    parser.add_argument("--sources", type=int, default=1, help="trainer ranks")
    parser.add_argument("--tensor", type=int, default=1, help="tensor parallel size of the trainer")
    parser.add_argument("--expert", type=int, default=1, help="expert parallel size of the trainer")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument(
        "--engine-gpus", type=int, default=1, help="GPUs, and tensor parallel size, of an engine"
    )
    parser.add_argument(
        "--buckets", default="512,1024,2048,4096,16384", help="MiB, one measurement each"
    )
    parser.add_argument(
        "--fan-out",
        default="direct",
        help="direct, chain, or both divided by a comma: how a source's engines get the weights",
    )
    parser.add_argument("--attempt", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--pause-mode", default="retract")
    parser.add_argument(
        "--load", type=int, default=0, help="requests that each engine is working on all the while"
    )
    parser.add_argument(
        "--between",
        type=float,
        default=3.0,
        help="seconds between updates under load, as steps have",
    )
    parser.add_argument(
        "--single-experts", action="store_true", help="each of a mixture's experts by itself"
    )
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument(
        "--check",
        action="store_true",
        help="ask all engines the same, whose answers must agree; on a GPU the first ones wait a "
        "minute and more for kernels that are compiled",
    )
    parser.add_argument("--out", type=Path, help="directory of the result's JSON file")
    parser.add_argument(
        "--role", choices=["parent", "source", "bare"], default="parent", help=argparse.SUPPRESS
    )
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "source":
        source(options)
    elif options.role == "bare":
        bare(options.directory, options.fan_out)
    else:
        with tempfile.TemporaryDirectory() as directory:
            options.directory = Path(directory)
            measure(options)


# --- the parent: engines, rendezvous, sources, table


def measure(options: argparse.Namespace) -> None:
    directory = options.directory
    dtype = "bfloat16" if GPUS else "float32"
    write_config(directory, options.shape, dtype, options.layers)
    with ExitStack() as stack:
        address = stack.enter_context(rendezvous(directory))
        servers = [
            stack.enter_context(engine(options, number)) for number in range(options.engines)
        ]
        asyncio.run(with_members(address, servers, options))
    ways = options.fan_out.split(",")
    results = [json.loads(updates(directory, way).read_text()) for way in ways]
    result = results[0] | {
        "rows": [row for one in results for row in one["rows"]],
        "first": {way: one["first"] for way, one in zip(ways, results, strict=True)},
    }
    run(options, "bare", 2, [0, options.sources] if GPUS else [])
    result |= json.loads((directory / "bare.json").read_text())
    result |= {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "shape": options.shape,
        "layers": read_shape(directory).layers,
        "sources": options.sources,
        "tensor": options.tensor,
        "expert": options.expert,
        "engines": options.engines,
        "engine_gpus": options.engine_gpus,
        "pause_mode": options.pause_mode,
        "load": options.load,
        "single_experts": options.single_experts,
    }
    table(result)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"weight-sync-{options.shape}"
        name += f"-{options.layers}-layers" if options.layers else ""
        name += f"-{options.sources}-to-{options.engines}x{options.engine_gpus}"
        name += f"-{options.pause_mode}-{options.load}"
        name += "-single-experts.json" if options.single_experts else ".json"
        (options.out / name).write_text(json.dumps(result, indent=2) + "\n")


def table(result: dict[str, Any]) -> None:
    trainer = (
        f"{result['sources']} trainer ranks (tensor {result['tensor']}, expert {result['expert']})"
    )
    engines = f"{result['engines']} engines of {result['engine_gpus']} GPUs"
    print(
        f"{result['shape']}, {result['layers']} layers, {result['bytes'] / 1e6:.0f} MB: {trainer} "
        f"-> {engines}, {result['machine']}"
    )
    print(f"pause mode {result['pause_mode']}, {result['load']} requests running at each engine")
    print(f"bare broadcast of the same bytes: {result['bare'] * 1e3:.1f} ms")
    first = ", ".join(f"{way} {seconds * 1e3:.0f} ms" for way, seconds in result["first"].items())
    print(f"first update: {first}; gather and conversion alone: {result['convert'] * 1e3:.1f} ms")
    print(
        f"{'fan-out':>8} {'bucket MiB':>10} {'update':>8} "
        + " ".join(f"{phase:>8}" for phase in PHASES)
        + "   update/bare"
    )
    for row in result["rows"]:
        phases = " ".join(f"{row[phase] * 1e3:8.1f}" for phase in PHASES)
        print(
            f"{row['fan_out']:>8} {row['bucket']:>10} {row['update'] * 1e3:8.1f} {phases}   "
            f"{row['update'] / result['bare']:.2f}"
        )
    print("medians in ms; paused: from the first pause to the last resume")
    print(f"\n{result['shape']} from one trainer rank over this link, computed, not measured (ms)")
    print(f"{'engines':>8} {'direct':>9} {'chain':>9}")
    bandwidth = result["bytes"] / result["bare"]
    for count in ENGINES:
        times = (way(count, result["bytes"], bandwidth) for way in (direct, chain))
        print(f"{count:>8} " + " ".join(f"{seconds * 1e3:9.0f}" for seconds in times))


def updates(directory: Path, way: str) -> Path:
    """The file in which the sources of one way to fan out leave their timings."""
    return directory / f"updates-{way}.json"


def machine() -> str:
    return (
        f"{GPUS} x {torch.cuda.get_device_name()}"
        if GPUS
        else f"{platform.machine()}, {os.cpu_count()} cores"
    )


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
def engine(options: argparse.Namespace, number: int) -> Iterator[str]:
    """An SGLang server; its address once its weights may be updated."""
    port = free_port()
    command = (
        f"{sys.executable} {PATH}/launch_server.py --model-path {options.directory} --load-format "
        f"dummy --port {port}"
    )
    command += (
        " --skip-tokenizer-init --skip-server-warmup --mem-fraction-static 0.6 --host 127.0.0.1"
    )
    command += f" --tp-size {options.engine_gpus} " + (GPU_ARGUMENTS if GPUS else CPU_ARGUMENTS)
    env = os.environ | {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "HF_HUB_OFFLINE": "1"}
    first = options.sources + number * options.engine_gpus
    gpus = [(first + one) % GPUS for one in range(options.engine_gpus)] if GPUS else []
    env |= visible(gpus) if GPUS else {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    with process(command.split(), env, options.directory / f"engine-{number}.log"):
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


async def with_members(address: str, servers: list[str], options: argparse.Namespace) -> None:
    """Join the engines, as the workers beside them do, while the sources measure. Raises SystemExit
    where engines that were sent the same weights do not answer alike.
    """
    busy: list[asyncio.Task[None]] = []
    clients: list[Client] = []
    answers: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for number, server in enumerate(servers):
            one = await stack.enter_async_context(Client(f"http://{server}"))
            clients.append(one)
            for _ in range(600):
                if (await one.health(timeout=5.0))[0]:
                    break
                await asyncio.sleep(0.5)
            else:
                log = options.directory / f"engine-{number}.log"
                raise SystemExit(
                    f"error: engine {number} is not ready after 300 s:\n{log.read_text()[-3000:]}"
                )
            hello = partial(engine_member, number, server, options.engine_gpus)
            membership = await stack.enter_async_context(Membership(address, hello))
            await membership.connected.wait()
            for request in range(options.load):
                busy.append(asyncio.create_task(keep_busy(one, request)))
        env = {"SLUICE_RENDEZVOUS": address}
        gpus = list(range(options.sources))
        for attempt, way in enumerate(options.fan_out.split(","), 1):
            more = ["--fan-out", way, "--attempt", str(attempt)]
            await asyncio.to_thread(run, options, "source", options.sources, gpus, env, more)
            checked = clients if options.check else []
            for number, said in enumerate(await asyncio.gather(*map(answer, checked))):
                answers[f"{way}, engine {number}"] = said
        for task in busy:
            task.cancel()
    for place, said in answers.items():
        print(f"log-probs of the weights, {place}: {said}")
    if len(set(answers.values())) > 1:
        raise SystemExit("error: engines with the same weights do not answer alike")


async def answer(one: Client) -> str:
    """The sum of an engine's log-probs of 32 tokens, which tells other weights by other digits."""
    prompt = [(i * 104729) % 2000 + 10 for i in range(64)]
    sampling = {"max_new_tokens": 32, "ignore_eos": True, "temperature": 0.0}
    return f"{sum((await one.generate('answer', prompt, sampling)).log_probs):.6f}"


async def keep_busy(one: Client, number: int) -> None:
    """One request after another, of 256 tokens and up to 2,000 more."""
    for again in itertools.count():
        prompt = [(number * 7919 + i * 104729) % 2000 + 10 for i in range(256)]
        await one.generate(
            f"{number}-{again}", prompt, {"max_new_tokens": 2000, "ignore_eos": True}
        )


def run(
    options: argparse.Namespace,
    role: str,
    processes: int,
    gpus: list[int],
    extra: dict[str, str] | None = None,
    more: Sequence[str] = (),
) -> None:
    arguments = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--master-port",
        str(free_port()),
    ]
    command = [sys.executable, *arguments, __file__, *sys.argv[1:], "--role", role]
    command += ["--directory", str(options.directory), "--shape", options.shape, *more]
    env = os.environ | NVLINK | (extra or {}) | (visible(gpus) if GPUS else {})
    subprocess.run(command, env=env, check=True, timeout=900)


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


# --- a trainer rank


def source(options: argparse.Namespace) -> None:
    from sluice_trainer.megatron import parallel
    from sluice_trainer.megatron.huggingface import mapping
    from sluice_trainer.megatron.model import building
    from sluice_trainer.megatron.model.config import transformer_config
    from sluice_trainer.peers import connected
    from sluice_trainer.weights.update import update_engines

    spec, env = job(options), environment(options)
    parallel.initialize(spec.trainer.parallelism, seed=1, timeout=timedelta(minutes=5))
    ranks = parallel.ranks(timedelta(minutes=5))
    shape = read_shape(options.directory)
    dtype = torch.bfloat16 if GPUS else torch.float32
    net = building.build(transformer_config(shape, spec.trainer.parallelism, dtype=dtype), shape)
    for parameter in (parameter for chunk in net for parameter in chunk.parameters()):
        parameter.data.normal_(0.0, 0.02)
    import threading

    stack = ExitStack()
    session = stack.enter_context(connected(env, spec, threading.Event(), rank=ranks.rank)).engines

    receivers: frozenset[int] = frozenset()

    def weights(ranks_with_engines: frozenset[int]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal receivers
        receivers = ranks_with_engines
        stack_name = None if options.single_experts else Layout().stack_name
        return mapping.hf_tensors(net, shape, stack_name, receivers)

    def update(version: int, bucket: int) -> tuple[float, dict[str, float]]:
        if options.load:
            time.sleep(
                options.between
            )  # or the engine still computes what it took back in the update before
        synchronise()
        started = time.perf_counter()
        outcomes = update_engines(weights, version, session, ranks, bucket_bytes=bucket << 20)
        seconds = time.perf_counter() - started
        failed = [reason for one in outcomes for reason in one.failed.values()]
        if failed or not outcomes:
            raise SystemExit(f"error: {failed or 'no engine took part'}")
        return seconds, {phase: max(one.seconds[phase] for one in outcomes) for phase in PHASES}

    sizes = [int(size) for size in options.buckets.split(",")]
    first, _ = update(1, sizes[0])
    version, rows = 1, []
    for size in sizes:
        timings = []
        for _ in range(options.updates):
            version += 1
            seconds, phases = update(version, size)
            timings.append(phases | {"update": seconds})
        rows.append(
            {"bucket": size, "fan_out": options.fan_out}
            | {key: statistics.median(timing[key] for timing in timings) for key in timings[0]}
        )
        if ranks.rank == 0:  # a machine may be taken away before the table
            ways = f"{options.fan_out}, buckets of {size} MiB"
            print(f"{ways}: {rows[-1]['update'] * 1e3:.1f} ms", flush=True)
    convert, total = conversion(partial(weights, receivers), sizes[-1])
    if ranks.rank == 0:
        report = {"first": first, "rows": rows, "convert": convert, "bytes": total}
        updates(options.directory, options.fan_out).write_text(json.dumps(report))
    stack.close()


def conversion(
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]], bucket: int
) -> tuple[float, int]:
    """Seconds of gathering and laying out all weights, with nobody to send them to; and their
    bytes."""
    from sluice_trainer.weights.buckets import buckets

    seconds = []
    for _ in range(5):
        synchronise()
        started = time.perf_counter()
        total = sum(one.data.nbytes for one in buckets(weights(), bucket << 20, Layout()))
        synchronise()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), total


def synchronise() -> None:
    if GPUS:
        torch.cuda.synchronize()


def job(options: argparse.Namespace) -> RLJobSpec:
    gpus = options.sources if GPUS else 0
    return RLJobSpec.model_validate({
        "model": {"path": str(options.directory), "init": "random"},
        "data": {"prompts": [{"path": "none.jsonl"}]},
        "reward": {"type": "exact_match"},
        "rollout": {"gpusPerReplica": options.engine_gpus if GPUS else 0},
        "trainer": {
            "steps": 1, "gpusPerNode": gpus, "processesPerNode": options.sources,
            "parallelism": {"tensor": options.tensor, "expert": options.expert},
        },
        "weightSync": {
            "pauseMode": options.pause_mode, "timeoutSeconds": 120, "fanOut": options.fan_out,
        },
    })  # fmt: skip


def environment(options: argparse.Namespace) -> Environment:
    variables = {
        "SLUICE_RENDEZVOUS": os.environ["SLUICE_RENDEZVOUS"],
        "SLUICE_CHECKPOINT_DIR": str(options.directory),
        "SLUICE_ATTEMPT": str(options.attempt),
    }
    return read("trainer", variables)


# --- the bare broadcast


def bare(directory: Path, ways: str) -> None:
    if GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if GPUS else "gloo")
    size = json.loads(updates(directory, ways.split(",")[0]).read_text())["bytes"]
    data = torch.zeros(size, dtype=torch.uint8, device="cuda" if GPUS else "cpu")
    seconds = []
    for _ in range(10):
        dist.barrier()
        synchronise()
        started = time.perf_counter()
        dist.broadcast(data, src=0)
        synchronise()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        (directory / "bare.json").write_text(json.dumps({"bare": statistics.median(seconds[2:])}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
