"""How a step's groups are spread over workers that all have room for more than their part.

    python benchmarks/sharing.py [--workers 2 8 100 1000] [--per-worker 8] [--steps 5] [--out FILE]

A real buffer in its own process, on a real database. Workers are simulated: real calls over
loopback, each with a channel of its own, no engines; each asks for as much as the whole step, and
again for what it has room left for, as workers do. A step is finished and committed at once, so
that all workers wait for the next one. Medians over the steps:
  handed out  from the commit until the last group of the next step is leased
  CPU         seconds of the buffer's process for a step, submits and commit included
  most, least groups of a worker in a step, at the extremes over all steps
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.thousand_engines import cpu_seconds
from sluice.wire.v1 import buffer_pb2 as pb
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group, make_job

WAIT_SECONDS = 60.0


@dataclass
class Step:
    """A step's groups, and which worker has how many of them."""

    size: int
    leased: list[pb.LeasedGroup] = field(default_factory=list)
    per_worker: Counter[str] = field(default_factory=Counter)
    # All are leased.
    out: asyncio.Event = field(default_factory=asyncio.Event)
    # It is committed.
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, worker: str, groups: list[pb.LeasedGroup]) -> None:
        self.leased += groups
        self.per_worker[worker] += len(groups)
        if len(self.leased) == self.size:
            self.out.set()


async def worker(client: Client, name: str, steps: list[Step]) -> None:
    """Lease as much of each step as there is, until newer weights are told."""
    for version, step in enumerate(steps):
        while not step.over.is_set():
            room = step.size - step.per_worker[name]
            if not room:
                await step.over.wait()
                break
            answer = await client.lease(name, count=room, version=version, wait=WAIT_SECONDS)
            step.add(name, answer.groups)


async def measure(root: Path, workers: int, per_worker: int, count: int) -> str:
    size = workers * per_worker
    job = make_job(
        root,
        rows=size,
        rollout__batchSize=size,
        trainer__steps=count + 1,
        buffer__storage__size="1Gi",
        buffer__leaseSeconds=600,
    )
    server, steps = BufferProcess(job, root), [Step(size) for _ in range(count + 1)]
    address = server.start()
    assert server.process
    seconds, cpu = list[float](), list[float]()
    try:
        async with AsyncExitStack() as stack:
            trainer = await stack.enter_async_context(Client(address))
            names = [f"rollout-{number}" for number in range(workers)]
            clients = [await stack.enter_async_context(Client(address)) for _ in names]
            tasks = [
                asyncio.create_task(worker(client, name, steps))
                for client, name in zip(clients, names, strict=True)
            ]
            begun, spent = time.perf_counter(), cpu_seconds(server.process.pid)
            for number, step in enumerate(steps, start=1):
                await asyncio.wait_for(step.out.wait(), 5 * WAIT_SECONDS)
                seconds.append(time.perf_counter() - begun)
                await trainer.submit(
                    make_group(lease.prompt, response=8, version=number - 1)
                    for lease in step.leased
                )
                await trainer.take(number, wait=20)
                begun = time.perf_counter()
                await trainer.commit(number)
                step.over.set()
                before, spent = spent, cpu_seconds(server.process.pid)
                cpu.append(spent - before)
            await asyncio.gather(*tasks)
    finally:
        server.end()
    spread = [step.per_worker[name] for step in steps[1:] for name in names]
    return (
        f"| {workers:,} | {size:,} | {statistics.median(seconds[1:]):.3f} s "
        f"| {statistics.median(cpu[1:]):.2f} s | {max(spread)} | {min(spread)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 100, 1000])
    parser.add_argument("--per-worker", type=int, default=8, help="groups of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "| workers | groups a step | handed out | CPU | most | least |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(lines))
    for workers in options.workers:
        with tempfile.TemporaryDirectory() as root:
            lines.append(
                asyncio.run(measure(Path(root), workers, options.per_worker, options.steps))
            )
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
