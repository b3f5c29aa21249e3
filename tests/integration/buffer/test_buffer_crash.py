"""kill -9 at random moments under load loses no acknowledged group and trains none twice.

Workers and a trainer run against `python -m sluice_buffer`, which is killed again and again; they
continue as real ones do. Every acknowledgement is recorded and compared with the state of the
buffer at the end.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import pytest

from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from tests.images import png
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group, make_sample

T = TypeVar("T")
BATCH, SAMPLES = 6, 2
KILLS = 8
# INTERNAL is the client library's code for a send into a connection that has just died.
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
ANSWERED = (pb.SubmitResponse.OUTCOME_STORED, pb.SubmitResponse.OUTCOME_DUPLICATE)


@dataclass
class Load:
    """Three workers and a trainer, and the answers that they got."""

    server: BufferProcess
    random: random.Random
    deadline: float
    # Group -> tokens of its first sample, as acknowledged.
    stored: dict[int, bytes] = field(default_factory=dict)
    batches: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    trained: dict[int, list[bytes]] = field(default_factory=dict)
    committed: int = 0
    checkpoint: int = 0
    attempt: int = 1
    kills: int = 0
    done: bool = False
    # Files of the images of the rows, by digest.
    files: dict[str, bytes] = field(default_factory=dict)

    async def call(self, method: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """A client's method, repeated while the buffer is away."""
        while True:
            assert time.monotonic() < self.deadline, "the buffer did not come back"
            try:
                async with Client(self.server.address) as client:
                    return await method(client, *args, **kwargs)
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY:
                    raise
            await asyncio.sleep(0.05)

    async def work(self, name: str) -> None:
        while not self.done:
            version = self.committed
            answer = await self.call(
                Client.lease, name, self.random.randint(1, 4), version, wait=0.2
            )
            groups = [self._generate(leased) for leased in answer.groups]
            await asyncio.sleep(self.random.random() * 0.01)
            finished = [
                g
                for g in groups
                if all(s.status == common.SAMPLE_STATUS_COMPLETED for s in g.samples)
            ]
            unfinished = [g for g in groups if g not in finished]
            await self._submit(finished)
            if unfinished:
                await self.call(Client.give_back, unfinished)

    def _generate(self, leased: pb.LeasedGroup) -> common.SampleGroup:
        if self.random.random() < 0.15:
            sample = make_sample(
                0,
                status=common.SAMPLE_STATUS_ABORTED,
                reward=None,
                response=self.random.randint(1, 9),
            )
            return common.SampleGroup(prompt=leased.prompt, samples=[sample])
        group = make_group(
            leased.prompt, response=self.random.choice([5, 500]), version=self.committed
        )
        nonce = self.random.randbytes(3) + b"\0"
        group.samples[0].tokens = group.samples[0].tokens[:4] + nonce + group.samples[0].tokens[8:]
        for sample in group.samples:
            sample.images.extend(leased.prompt.images)
        return group

    async def _submit(self, groups: list[common.SampleGroup]) -> None:
        """Submit groups until each is answered, again if an answer was lost with the buffer."""
        while groups:
            answers = await self.call(Client.submit, groups)
            for key, answer in answers.items():
                if answer.outcome in ANSWERED:
                    self._acknowledged(groups[key])
            groups = [g for key, g in enumerate(groups) if key not in answers]

    def _acknowledged(self, group: common.SampleGroup) -> None:
        tokens = group.samples[0].tokens
        assert self.stored.setdefault(group.prompt.group_id, tokens) == tokens, (
            "two submits of one group were taken"
        )

    async def train(self) -> None:
        while self.kills < KILLS or self.committed < KILLS:
            step, attempt = self.committed + 1, self.attempt
            batch = await self.call(Client.take, step, ranks=2, attempt=attempt, wait=0.5)
            if batch.state != pb.TakeBatchResponse.STATE_READY:
                continue
            ids = [(s.group_id, s.index, s.rank) for s in batch.sequences]
            assert self.batches.setdefault(step, ids) == ids, f"batch {step} has changed"
            shards = [await self.call(Client.shard, step, rank, 2, attempt) for rank in range(2)]
            tokens = sorted(s.tokens for shard in shards for g in shard for s in g.samples)
            assert self.trained.setdefault(step, tokens) == tokens, (
                f"the samples of batch {step} have changed"
            )
            await self._check_images(shards)
            await self.call(Client.commit, step, attempt)
            self.committed = step
            await self._sometimes_checkpoint_or_restart()
        self.done = True

    async def _check_images(self, shards: list[list[common.SampleGroup]]) -> None:
        """All images of a batch are there, as they were when their prompts were leased."""
        samples = [sample for shard in shards for group in shard for sample in group.samples]
        digests = sorted({digest for sample in samples for digest in sample.images})
        assert bool(digests) == bool(self.files)
        for image in await self.call(Client.images, digests):
            assert image.data == self.files[image.digest]

    async def _sometimes_checkpoint_or_restart(self) -> None:
        if self.random.random() < 0.25:
            step, attempt = self.committed, self.attempt
            await self.call(Client.checkpoint, step, attempt)
            self.checkpoint = step
        elif self.random.random() < 0.15:
            self.attempt += 1
            back, attempt = self.checkpoint, self.attempt
            await self.call(Client.rewind, back, attempt)
            self.committed = back

    async def kill(self) -> None:
        while not self.done and self.kills < KILLS:
            await asyncio.sleep(self.random.uniform(0.05, 0.8))
            await asyncio.to_thread(self.server.end, signal.SIGKILL)
            self.kills += 1
            await asyncio.to_thread(self.server.start)

    async def check(self) -> None:
        """The books are right, and what was acknowledged is what was trained."""
        stats = await self.call(Client.stats)
        print(f"{self.kills} kills, {len(self.stored)} groups acknowledged")
        assert (stats.step, stats.counters["groups_trained"]) == (
            self.committed,
            self.committed * BATCH,
        )
        assert stats.counters["groups_lost"] == 0
        assert stats.counters["groups_trained_twice"] == 0
        ids = [
            group_id
            for step in self.batches
            for group_id, index, _ in self.batches[step]
            if index == 0
        ]
        assert len(ids) == len(set(ids)) >= self.committed * BATCH
        for step, batch in self.batches.items():
            for group_id, index, _ in batch:
                if index == 0 and group_id in self.stored:
                    assert self.stored[group_id] in self.trained[step], (
                        f"group {group_id} is not what was acknowledged"
                    )
        assert stats.depth + len(ids) >= len(self.stored)
        assert stats.images <= len(self.files)


async def run(load: Load) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(load.work(f"rollout-{number}"))
        group.create_task(load.train())
        group.create_task(load.kill())


def seeds() -> list[int]:
    setting = os.environ.get("SLUICE_CRASH_SEED")
    return [int(setting)] if setting else [random.SystemRandom().randrange(1 << 30)]


def write_rows(path: Path, rows: int) -> dict[str, bytes]:
    """Write rows with one or two of few images each; return the files by digest."""
    images = [png(20 * (i + 1), 30, seed=i) for i in range(12)]
    for number, image in enumerate(images):
        (path.parent / f"{number}.png").write_bytes(image.data)
    with path.open("w") as file:
        for row in range(rows):
            names = [f"{(row + i) % len(images)}.png" for i in range(1 + row % 2)]
            prompt = [{"role": "user", "content": "<image>" * len(names)}]
            file.write(json.dumps({"prompt": prompt, "label": "", "images": names}) + "\n")
    return {image.digest: image.data for image in images}


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("seed", seeds(), ids=["seed"])
async def test_kill_9_under_load_loses_nothing(
    make_server: Callable[..., BufferProcess], tmp_path: Path, seed: int, images: bool
) -> None:
    print(f"SLUICE_CRASH_SEED={seed}")
    changes: dict[str, Any] = {
        "rows": 400,
        "rollout__batchSize": BATCH,
        "rollout__samplesPerPrompt": SAMPLES,
        "rollout__mode": "async",
        "rollout__maxStaleness": 2,
        "rollout__partial": {"enabled": True},
        "trainer__steps": 100_000,
        "buffer__leaseSeconds": 1.0,
    }
    files = {}
    if images:
        files = write_rows(tmp_path / "rows.jsonl", 400)
        changes |= {"data__images": {}, "data__prompts": [{"path": str(tmp_path / "rows.jsonl")}]}
    server = make_server(**changes)
    server.start()
    load = Load(server, random.Random(seed), time.monotonic() + 60, files=files)
    await run(load)
    await load.check()
