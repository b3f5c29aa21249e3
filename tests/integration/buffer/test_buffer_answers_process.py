"""Batches of given answers over gRPC: the same ones again after kill -9."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1.common_pb2 import SAMPLE_STATUS_COMPLETED
from sluice_buffer.serving.service import HELD_OUT_BYTES, HELD_OUT_ROWS
from tests.chat import assistant, save, user
from tests.unit.buffer.buffer_tools import BufferProcess, Client

ROWS = 40


def sft_job(directory: Path) -> dict[str, Any]:
    """Changes that make the usual job one that learns from conversations."""
    (directory / "model").mkdir()
    model = save(directory / "model")
    rows = [{"messages": [user("?" * i), assistant(str(i))]} for i in range(1, ROWS + 1)]
    (directory / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"path": str(model)},
        "data": {"prompts": [{"path": str(directory / "chats.jsonl")}], "seed": 3},
        "rollout": {"batchSize": 10},
        "trainer": {"epochs": 2},
        "algorithm": {"loss": {"type": "sft"}},
        "reward": None,
    }


async def shards(client: Client, step: int, attempt: int) -> list[bytes]:
    """The batch of a step, from the shards of two ranks."""
    taken = await client.take(step, ranks=2, attempt=attempt, wait=20)
    assert taken.state == pb.TakeBatchResponse.STATE_READY, taken.waiting_for
    groups = [
        g for rank in (0, 1) for g in await client.shard(step, rank, ranks=2, attempt=attempt)
    ]
    assert len(groups) == 10
    return sorted(group.SerializeToString() for group in groups)


async def test_batches_are_made_and_made_again_after_a_kill(
    make_server: Callable[..., BufferProcess], tmp_path: Path
) -> None:
    process = make_server(**sft_job(tmp_path))
    async with Client(process.start(60)) as client:
        assert not (await client.lease(count=5)).groups, "workers have nothing to generate"
        first = {}
        for step in (1, 2, 3):
            first[step] = await shards(client, step, 1)
            await client.commit(step)
        await client.checkpoint(1)
        process.end(signal.SIGKILL)
    async with Client(process.start(60)) as client:
        assert await client.rewind(1, attempt=2) == 2
        for step in range(2, 9):
            again = await shards(client, step, 2)
            assert again == first.get(step, again)
            await client.commit(step, attempt=2)
        end = await client.take(9, attempt=2, wait=1)
        assert end.state == pb.TakeBatchResponse.STATE_EXHAUSTED
        counters = (await client.stats()).counters
        assert counters["groups_trained"] == counters["groups_leased"] == 2 * ROWS
        assert counters["groups_lost"] == counters["groups_trained_twice"] == 0
    assert process.end() == 143


async def test_a_page_of_held_out_rows_ends_with_a_number_or_with_bytes(
    make_server: Callable[..., BufferProcess], tmp_path: Path
) -> None:
    job = sft_job(tmp_path)
    (tmp_path / "model/config.json").write_text('{"max_position_embeddings": 1000000}')
    contents = ["1"] * 300 + ["8 3 " * 100_000] * 4
    rows = [{"messages": [user("?"), assistant(content)]} for content in contents]
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job["evaluation"] = {"heldOut": [{"path": str(held_out)}]}
    async with Client(make_server(**job).start(60)) as client:
        pages, first = [], 0
        while page := await client.held_out(0, first):
            pages.append(len(page))
            first += len(page)
            assert all(group.samples[0].status == SAMPLE_STATUS_COMPLETED for group in page)
            size = sum(group.ByteSize() for group in page)
            assert size < HELD_OUT_BYTES + page[-1].ByteSize()
        assert pages == [HELD_OUT_ROWS, 300 - HELD_OUT_ROWS + 2, 2]
        assert not await client.held_out(0, len(rows) + 5)
        with pytest.raises(grpc.aio.AioRpcError, match="counted from 0, found -1"):
            await client.held_out(0, -1)
