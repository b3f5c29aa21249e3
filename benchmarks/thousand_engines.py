"""A buffer with many workers: what those that wait cost those that work, and what all of them cost
when idle.

    python benchmarks/thousand_engines.py [--workers 0 10 100 1000] [--groups 4000] [--out FILE]

A real buffer in its own process, on a real database. Workers are simulated: real calls over
loopback, each with a channel of its own, no engines. For each number of workers, in turn:
  submits    32 workers hand in small groups (8 x 64 tokens), one at a time each, while all others
             wait for prompts: submits a second, and how long one takes (p50, p99)
  idle       all wait for prompts and hold none: the buffer's share of one core
  generating all have 8 leases each, for which they send heartbeats every 20 s: the same
And once, on a database of a million trained groups:
  reload     seconds from opening the database to a memory that can be worked with
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_buffer.group import Group, GroupState
from sluice_buffer.state.loading import load
from sluice_buffer.state.memory import PROGRESS, pack_ids
from sluice_buffer.state.storage import Storage, WriteBatch, number
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group, make_job

ACTIVE = 32
HEARTBEAT_SECONDS = 20.0
IDLE_SECONDS = 20.0
LEASES = 8


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def simulate(address: str, count: int, version: int, *, generating: bool) -> None:
    """`count` workers that wait for prompts, or send heartbeats for those that they have, until
    they are killed."""

    async def run_engine(name: str, delay: float) -> None:
        prompts = [common.Prompt(lease_id=f"t{i}.1", lease_attempt=1) for i in range(LEASES)]
        async with Client(address) as client:
            await asyncio.sleep(delay if generating else 0)
            while generating:
                await client.heartbeat(prompts, name)
                await asyncio.sleep(HEARTBEAT_SECONDS)
            while True:
                if (await client.lease(name, version=version, wait=60.0)).groups:
                    raise RuntimeError("a waiting worker was given prompts: nothing is measured")

    workers = [
        asyncio.create_task(run_engine(f"idle-{i}", HEARTBEAT_SECONDS * i / count))
        for i in range(count)
    ]
    await asyncio.sleep(2.0 + count / 200)
    print("waiting", flush=True)
    await asyncio.gather(*workers)


async def submit_all(clients: list[Client], groups: list[common.SampleGroup]) -> list[float]:
    """Seconds of each submit; every client has one under way at a time."""
    queue: asyncio.Queue[common.SampleGroup] = asyncio.Queue()
    for group in groups:
        queue.put_nowait(group)
    seconds: list[float] = []

    async def work(client: Client) -> None:
        ready: asyncio.Queue[common.Chunk | None] = asyncio.Queue()

        async def send() -> AsyncIterator[common.Chunk]:
            while (chunk := await ready.get()) is not None:
                yield chunk

        answers = client.stub.Submit(send(), metadata=client.metadata, timeout=300)
        while not queue.empty():
            (chunk,) = codec.to_chunks(1, queue.get_nowait().SerializeToString())
            start = time.perf_counter()
            ready.put_nowait(chunk)
            answer = await answers.read()
            seconds.append(time.perf_counter() - start)
            if answer.outcome != pb.SubmitResponse.OUTCOME_STORED:
                raise RuntimeError(f"not stored: {answer}")
        ready.put_nowait(None)

    await asyncio.gather(*map(work, clients))
    return seconds


async def share_of_core(pid: int) -> float:
    before = cpu_seconds(pid)
    await asyncio.sleep(IDLE_SECONDS)
    return (cpu_seconds(pid) - before) / IDLE_SECONDS


@contextmanager
def simulated(address: str, workers: int, version: int, *, generating: bool) -> Iterator[None]:
    """Workers in a process of their own."""
    if not workers:
        yield
        return
    arguments = [
        sys.executable,
        __file__,
        "--simulate",
        address,
        str(workers),
        str(version),
        str(int(generating)),
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


async def measure(address: str, pid: int, workers: int, step: int, count: int) -> dict[str, float]:
    async with Client(address) as trainer:
        prompts = [g.prompt for g in (await trainer.lease(count=count, version=step - 1)).groups]
        with simulated(address, workers, step - 1, generating=True):
            generating = await share_of_core(pid)
        with simulated(address, workers, step - 1, generating=False):
            idle = await share_of_core(pid)
            groups = [
                make_group(prompt, samples=8, response=64, version=step - 1) for prompt in prompts
            ]
            clients = [Client(address) for _ in range(ACTIVE)]
            start = time.perf_counter()
            seconds = await submit_all(clients, groups)
            elapsed = time.perf_counter() - start
            for client in clients:
                await client.channel.close()
        await trainer.take(step, wait=20)
        await trainer.commit(step)
        await trainer.checkpoint(step)
    percentiles = statistics.quantiles(seconds, n=100)
    times = {"p50": percentiles[49], "p99": percentiles[98]}
    return {"rate": count / elapsed, "idle": idle, "generating": generating, **times}


async def run(options: argparse.Namespace, root: Path) -> list[str]:
    job = make_job(
        root,
        rows=options.groups,
        rollout__batchSize=options.groups,
        rollout__samplesPerPrompt=8,
        trainer__steps=len(options.workers) + 1,
        buffer__storage__size="8Gi",
        buffer__leaseSeconds=600,
    )
    server = BufferProcess(job, root)
    address = server.start()
    assert server.process
    lines = [
        "| workers | submits/s while they wait | p50 | p99 | CPU, all wait | CPU, all generate |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    try:
        for step, workers in enumerate(options.workers, start=1):
            row = await measure(address, server.process.pid, workers, step, options.groups)
            times = f"{row['p50'] * 1e3:.1f} ms | {row['p99'] * 1e3:.1f} ms"
            lines.append(
                f"| {workers:,} | {row['rate']:,.0f} | {times} | {row['idle']:.1%} | "
                f"{row['generating']:.1%} |"
            )
            print(lines[-1], flush=True)
    finally:
        server.end()
    return lines


def reload_seconds(root: Path, groups: int, batch: int = 1000) -> float:
    """Of a database in which all groups are trained and covered by a checkpoint."""
    storage = Storage(root / "million", 4 << 30)
    steps = groups // batch
    for step in range(1, steps + 1):
        changes, ids = WriteBatch(), list(range((step - 1) * batch, step * batch))
        for group_id in ids:
            changes.put("groups", number(group_id), Group(GroupState.TRAINED, 1, step=step).pack())
        changes.put("batches", number(step), pack_ids(ids))
        if step == steps:
            numbers = (
                f'{{"step": {steps}, "checkpoint_step": {steps}, "next_group": {groups}, '
                f'"counters": {{}}}}'
            )
            changes.put("meta", PROGRESS, numbers.encode())
        storage.write(changes)
    times = []
    for _ in range(3):
        storage.reopen()
        start = time.perf_counter()
        memory = load(storage, 0.0)
        times.append(time.perf_counter() - start)
    if memory.lost or memory.twice or memory.trained != groups:
        raise RuntimeError("the database was not loaded right")
    storage.close()
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 10, 100, 1000])
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--reload-groups", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--simulate", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.simulate:
        address, *numbers = options.simulate
        count, version, generating = map(int, numbers)
        asyncio.run(simulate(address, count, version, generating=bool(generating)))
        return
    with tempfile.TemporaryDirectory() as root:
        lines = asyncio.run(run(options, Path(root)))
        seconds = reload_seconds(Path(root), options.reload_groups)
        lines += [
            "",
            f"Reload of {options.reload_groups:,} trained groups: {seconds:.1f} s (median of 3).",
        ]
        print(lines[-1])
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
