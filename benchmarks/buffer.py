"""Durable Submit over loopback, beside a bare gRPC stream of the same messages and a bare database.

    python benchmarks/buffer.py [--repeats 7] [--out FILE]

Three things in turn, interleaved, in one run, with the same bytes:
  buffer    `python -m sluice_buffer` in its own process: each group assembled, checked, and on
            disk before its answer
  bare      a gRPC server in its own process whose handler only answers each message's last piece
  database  no gRPC: the same groups into the same database, as many to a commit as the buffer had
            on average
The client is the same for both servers: one stream, chunk messages made beforehand, all answers
awaited. Medians.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from sluice.wire import codec, rpc
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc
from sluice.wire.v1 import common_pb2 as common
from sluice_buffer.state.storage import Storage, WriteBatch, number, pieces
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_job

SAMPLES = 8
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Case:
    name: str
    response: int
    groups: int


CASES = (
    Case("8 x 64 tokens", 64, 4000),
    Case("8 x 1k tokens", 1024, 1600),
    Case("8 x 16k tokens", 16384, 200),
)


class Bare(buffer_pb2_grpc.BufferServicer):
    """The limit: what Python's gRPC gives for these messages when nothing is done with them."""

    async def Submit(
        self, requests: AsyncIterator[common.Chunk], context: object
    ) -> AsyncIterator[pb.SubmitResponse]:
        async for chunk in requests:
            if chunk.last:
                yield pb.SubmitResponse(key=chunk.key, outcome=pb.SubmitResponse.OUTCOME_STORED)


async def serve_bare() -> None:
    server = rpc.server()
    buffer_pb2_grpc.add_BufferServicer_to_server(Bare(), server)
    print(rpc.bind(server, "127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def group_of(
    prompt: common.Prompt, response: int, version: int, noise: np.random.Generator
) -> bytes:
    tokens = noise.integers(0, 150_000, PROMPT_TOKENS + response, dtype=np.int32)
    log_probs = -noise.random(response, dtype=np.float32)
    sample = common.Sample(
        tokens=tokens.astype("<i4").tobytes(),
        response_length=response,
        response="word " * (response // 2),
        loss_mask=bytes([1]) * response,
        rollout_log_probs=log_probs.astype("<f4").tobytes(),
        weight_versions=[common.WeightSpan(version=version, start=0, end=response)],
        status=common.SAMPLE_STATUS_COMPLETED,
    )
    group = common.SampleGroup(prompt=prompt, samples=[sample] * SAMPLES)
    for index, sample in enumerate(group.samples):
        sample.index, sample.reward = index, float(index % 2)
    return group.SerializeToString()


async def stream(client: Client, groups: Sequence[bytes]) -> float:
    """Seconds until every group is answered."""
    chunks = [chunk for key, data in enumerate(groups) for chunk in codec.to_chunks(key, data)]

    async def send() -> AsyncIterator[common.Chunk]:
        for chunk in chunks:
            yield chunk

    start, answered = time.perf_counter(), 0
    async for answer in client.stub.Submit(send(), metadata=client.metadata, timeout=120):
        if answer.outcome != pb.SubmitResponse.OUTCOME_STORED:
            raise RuntimeError(f"group {answer.key}: {answer}")
        answered += 1
    if answered != len(groups):
        raise RuntimeError(f"{answered} answers for {len(groups)} groups")
    return time.perf_counter() - start


def write_all(storage: Storage, groups: Sequence[bytes], together: int) -> float:
    start = time.perf_counter()
    for first in range(0, len(groups), together):
        batch = WriteBatch()
        for key, data in enumerate(groups[first : first + together], start=first):
            for position, part in enumerate(pieces(data)):
                batch.put("samples", number(key) + position.to_bytes(4, "big"), part)
        storage.write(batch)
    return time.perf_counter() - start


async def lease_all(client: Client, count: int) -> list[common.Prompt]:
    prompts: list[common.Prompt] = []
    while len(prompts) < count:
        version = (await client.stats()).version
        prompts += [
            group.prompt for group in (await client.lease(count=count, version=version)).groups
        ]
    return prompts


@dataclass
class Bench:
    case: Case
    buffer: Client
    bare: Client
    storage: Storage
    noise: np.random.Generator

    async def repeat(self, step: int) -> dict[str, float]:
        """Seconds of each of the three, for the groups of one step."""
        prompts = await lease_all(self.buffer, self.case.groups)
        groups = [group_of(prompt, self.case.response, step - 1, self.noise) for prompt in prompts]
        before = (await self.buffer.stats()).counters.get("commits", 0)
        result = {
            "buffer": await stream(self.buffer, groups),
            "bare": await stream(self.bare, groups),
        }
        commits = (await self.buffer.stats()).counters.get("commits", 0) - before
        together = max(1, round(len(groups) / max(commits, 1)))
        result |= {"database": write_all(self.storage, groups, together), "together": together}
        result["bytes"] = sum(map(len, groups)) / len(groups)
        await self.buffer.take(step, wait=5)
        await self.buffer.commit(step)
        await self.buffer.checkpoint(step)
        return result


async def measure(case: Case, repeats: int, root: Path) -> list[dict[str, float]]:
    bare = subprocess.Popen(
        [sys.executable, __file__, "--serve-bare"], stdout=subprocess.PIPE, text=True
    )
    assert bare.stdout
    port = int(bare.stdout.readline())
    job = make_job(
        root,
        rows=case.groups,
        rollout__batchSize=case.groups,
        rollout__samplesPerPrompt=SAMPLES,
        trainer__steps=repeats + 2,
        buffer__storage__size="8Gi",
        buffer__leaseSeconds=600,
    )
    server, storage = BufferProcess(job, root), Storage(root / "plain", 8 << 30)
    try:
        async with Client(server.start()) as client, Client(f"127.0.0.1:{port}") as other:
            bench = Bench(case, client, other, storage, np.random.default_rng(0))
            await bench.repeat(1)  # warm: file grown, connections made
            return [await bench.repeat(step) for step in range(2, repeats + 2)]
    finally:
        server.end()
        bare.terminate()
        bare.wait(10)
        storage.close()


def table(results: dict[Case, list[dict[str, float]]]) -> str:
    lines = [
        "| group | bytes | buffer groups/s | MB/s | bare groups/s | MB/s | buffer / bare | "
        "database groups/s | MB/s | groups a commit |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case, rows in results.items():
        size = rows[0]["bytes"]
        rate = {
            n: statistics.median(case.groups / row[n] for row in rows)
            for n in ("buffer", "bare", "database")
        }
        ratio = statistics.median(row["bare"] / row["buffer"] for row in rows)
        cells = [
            f"{rate[n]:,.0f} | {rate[n] * size / 1e6:,.1f}" for n in ("buffer", "bare", "database")
        ]
        together = statistics.median(row["together"] for row in rows)
        lines.append(
            f"| {case.name} | {size:,.0f} | {cells[0]} | {cells[1]} | {ratio:.0%} | {cells[2]} | "
            f"{together:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this case")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve-bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_bare:
        asyncio.run(serve_bare())
        return
    results = {}
    for position, case in enumerate(CASES):
        if options.case in (None, position):
            with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as root:
                results[case] = asyncio.run(measure(case, options.repeats, Path(root)))
    print(table(results))
    if options.out:
        options.out.write_text(table(results) + "\n")


if __name__ == "__main__":
    main()
