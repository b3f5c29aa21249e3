"""Episodes in a row: what they leave behind in a worker, and in a cluster.

    python benchmarks/episodes.py worker [--episodes 10000]
    python benchmarks/episodes.py cluster [--episodes 10000]
    python benchmarks/episodes.py verifiers [--episodes 200]

worker: the gateway of a worker with an engine that answers at once. First so many functions that
play at it, then so many pods that join, are given an episode, ask and tell their end; all in this
process, whose memory is shown after the first tenth and at the end.

cluster: the operator, a process of its own, at a real API server (as tests/cluster has it). A
kubelet is played here, which says that each pod has ended as soon as it sees it.

verifiers: episodes of one turn, of the taskset in examples/agents/verifiers, in the interpreter
that has verifiers (make agents): first as children of one interpreter, then, a tenth of them, with
an interpreter for each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import gc
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client import REGISTRY

from benchmarks.agents import ANSWER, MIB, PARAMS, SPECIAL, Bench
from sluice.engines.protocol import Generation
from sluice.engines.sglang.client import Client
from sluice.samples import episode_protocol as wire
from sluice.samples.sample import Prompt, Sample, SampleStatus, WeightSpan
from sluice.telemetry import logs
from sluice_cli.data.verifiers_rows import rows_of
from sluice_operator.cluster.kube.api import Api
from sluice_operator.plan.facts import names
from sluice_rollout.environments.pods import EpisodePods
from sluice_rollout.environments.program import Program, program_of
from sluice_rollout.episode import Play
from sluice_rollout.gateway.registry import EpisodeRegistry, PodAddress
from sluice_rollout.generate import Generator
from sluice_rollout.health import EngineHealth
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests.cluster.conftest import install_crds
from tests.cluster.control_plane import control_plane
from tests.cluster.operators import Operator
from tests.cluster.test_episode_pods import PODS, VERIFIERS, at_work, end_all, there
from tests.cluster.world import World, new_world
from tests.integration.engines import save_model
from tests.integration.rollout.talkative import save_talkative
from tests.tools import ROOT
from tests.unit.buffer.buffer_tools import make_job

AGENTS = ROOT / "examples/agents"
TOKEN = "token"
SIDE_BY_SIDE, POD_SECONDS = 64, 300.0
# When the episode of this context had its turn.
STARTED: contextvars.ContextVar[float] = contextvars.ContextVar("STARTED", default=0.0)


class Constant(Client):
    """The same tokens at once. waited: seconds from an episode's turn to its request."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.waited: list[float] = []

    async def generate(self, rid: str, input_ids: list[int], *args: Any, **kw: Any) -> Generation:
        self.waited.append(time.perf_counter() - STARTED.get())
        spans = [WeightSpan(0, 0, ANSWER)]
        return Generation([SPECIAL] * ANSWER, [-1.0] * ANSWER, spans, "stop", None)


@dataclass
class Worker:
    """A worker's gateway, whose episodes are pods or a function. join: its address for pods."""

    runner: EpisodeRunner
    pods: EpisodePods
    engine: Constant
    join: str

    async def play(self, number: int) -> None:
        STARTED.set(time.perf_counter())
        sample = await self.runner(Prompt(number, "w0001"), [5], Sample(0, reward=1.0), PARAMS)
        assert sample.status is SampleStatus.COMPLETED, sample.error


@asynccontextmanager
async def worker(model: Path, play: Play | None, host: str, port: int) -> AsyncIterator[Worker]:
    """play: the function; None: pods play."""
    environment = {"command": ["agent"], "image": "agent:1"}
    spec = make_job(
        model.parent, model__path=str(model), rollout__environment=environment,
        rollout__sampling__maxResponseTokens=2000,
    ).spec  # fmt: skip
    encoder, pods = PromptEncoder(spec, model), EpisodePods.create(TOKEN, POD_SECONDS, "kubectl")
    address = PodAddress(host, port, pods.join)
    async with (
        Constant("http://127.0.0.1:9") as engine,
        EpisodeRegistry.for_job(spec, encoder, address) as registry,
    ):
        health = EngineHealth(engine, 60.0)
        slots = asyncio.Semaphore(SIDE_BY_SIDE)
        generator = Generator(engine, encoder.decode, slots, lambda: 0, health)
        runner = EpisodeRunner(
            play or pods, "agent", generator, encoder.tokenizer, 600.0, None, registry.open_gateway
        )
        yield Worker(runner, pods, engine, f"http://{host}:{registry.server.port}{wire.PATH}")


# -- worker


async def in_a_row(count: int, play: Callable[[int], Awaitable[None]], kind: str) -> None:
    """Play so many, some side by side; what this process has then."""
    process, turns, begun = psutil.Process(), iter(range(count)), time.perf_counter()

    async def one_after_another() -> None:
        for number in turns:
            await play(number)
            if number == count // 10:
                print_memory(f"after {number:,} {kind}", process)

    await asyncio.gather(*(one_after_another() for _ in range(SIDE_BY_SIDE)))
    seconds = time.perf_counter() - begun
    print_memory(f"after {count:,} {kind}", process)
    print(f"  {seconds:.0f} s, {count / seconds:.0f} a second")


def print_memory(when: str, process: psutil.Process) -> None:
    gc.collect()
    series = sum(len(metric.samples) for metric in REGISTRY.collect())
    print(
        f"{when}: {process.memory_info().rss / MIB:.0f} MiB, {process.num_fds()} open files, "
        f"{len(asyncio.all_tasks())} tasks, {series} series of metrics",
        flush=True,
    )


async def at_worker(count: int, model: Path) -> None:
    bench = Bench(1)
    async with worker(model, bench.play, "127.0.0.1", 0) as episode_worker:
        await in_a_row(count, episode_worker.play, "functions")
    async with worker(model, None, "127.0.0.1", 0) as episode_worker:

        async def play(number: int) -> None:
            await asyncio.gather(
                episode_worker.play(number), pretended_pod(episode_worker.join, number)
            )

        await in_a_row(count, play, "pods")


async def pretended_pod(join: str, number: int) -> None:
    """A sidecar whose program asks once."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    request = {"model": "m", "prompt": "w0001", "max_tokens": ANSWER}
    async with aiohttp.ClientSession() as session:
        address = f"{join}?pod=agent-{number}"
        async with session.ws_connect(address, headers=headers) as socket:
            key = {"Authorization": f"Bearer {(await socket.receive_json())['key']}"}
            url = f"{join.removesuffix(wire.PATH)}/v1/completions"
            async with session.post(url, json=request, headers=key) as answer:
                await answer.read()
            left = {"status": 0, "errors": "", "result": '{"reward": 1}', "refused": None}
            await socket.send_json(left)
            await socket.receive()


# -- cluster


async def at_cluster(count: int, directory: Path) -> None:
    with control_plane() as plane:
        os.environ["KUBECONFIG"] = plane.kubeconfig
        async with await Api.connect() as api:
            await install_crds(api)
            async with new_world(api, "episodes") as world:
                operator = Operator(plane.kubeconfig, "episodes", directory / "operator.log")
                try:
                    await operator.ready()
                    await at_work(world)
                    await come_and_go(world, operator, count)
                finally:
                    operator.end()


async def come_and_go(world: World, operator: Operator, count: int) -> None:
    process, begun, over = psutil.Process(operator.process.pid), time.perf_counter(), set[str]()
    before, shown = await there(world), 0
    while len(over) < count:
        over |= await end_all(world)
        if len(over) * 10 >= count * (shown + 1):
            shown += 1
            memory = process.memory_info().rss / MIB
            print(f"after {len(over):,} pods: the operator has {memory:.0f} MiB", flush=True)
    seconds = time.perf_counter() - begun
    await world.until_pods(PODS, names.EPISODE)
    await world.until_pods(VERIFIERS, names.VERIFIER)
    print(f"  {seconds:.0f} s, {len(over) / seconds:.0f} a second")
    print(f"  objects before and behind: {before}, {await there(world)}")


# -- verifiers


async def at_verifiers(count: int, directory: Path) -> None:
    """The same episodes twice: forked, and with an interpreter for each."""
    logs.configure("rollout", name="episodes", attempt=1)
    model = save_talkative(save_model(directory / "bare", 0), directory / "model")
    os.environ["PYTHONPATH"] = str(AGENTS / "verifiers")
    python = str(ROOT / ".venv-verifiers/bin/python")
    verifiers = {"name": "two_tools", "python": python}
    (row,) = rows_of("two_tools", {}, python, 1)
    environment = {"verifiers": verifiers, "env": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    spec = make_job(directory, model__path=str(model), rollout__environment=environment).spec
    assert spec.rollout.environment
    for kind, episodes in (("forked", count), ("an interpreter for each", max(count // 10, 8))):
        program = program_of(spec.rollout.environment, spec)
        assert program.fork_server
        if kind != "forked":
            program.command, program.fork_server = program.fork_server.single_episode_command, None
        before, begun = cpu_seconds(), time.perf_counter()
        await program.check()
        seconds = time.perf_counter() - begun
        print(f"{kind}: ready after {seconds:.1f} s, {cpu_seconds() - before:.1f} s of a core")
        try:
            await of_program(program, model, row, episodes)
        finally:
            program.close()


async def of_program(program: Program, model: Path, row: dict[str, Any], count: int) -> None:
    """Play so many episodes of a row, as many side by side as there are cores."""
    async with worker(model, program, "127.0.0.1", 0) as episode_worker:
        turns, before, begun = iter(range(count)), cpu_seconds(), time.perf_counter()

        async def one_after_another() -> None:
            for number in turns:
                prompt = Prompt(number, row["prompt"], None, row["metadata"])
                sample = await episode_worker.runner(prompt, [5], Sample(0), PARAMS)
                assert not sample.error, sample.error

        await asyncio.gather(*(one_after_another() for _ in range(os.cpu_count() or 1)))
        seconds, cpu = time.perf_counter() - begun, cpu_seconds() - before
    print(
        f"  {count} episodes: {count / seconds:.2f} a second, {cpu / count:.2f} s of a core each, "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def cpu_seconds() -> float:
    """Of this process and of all that it has started, at work or ended."""
    process = psutil.Process()
    times = [member.cpu_times() for member in (process, *process.children())]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", choices=["worker", "cluster", "verifiers"])
    parser.add_argument("--episodes", type=int, default=10_000)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory:
        if options.where == "cluster":
            asyncio.run(at_cluster(options.episodes, Path(directory)))
        elif options.where == "verifiers":
            asyncio.run(at_verifiers(options.episodes, Path(directory)))
        else:
            model = save_model(Path(directory) / "model", 0)
            asyncio.run(at_worker(options.episodes, model))


if __name__ == "__main__":
    main()
