"""A job that is given up: all the failures that led to it can be read by then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_buffer.rules.admission import barren_limit
from sluice_buffer.serving.budget import Budget
from sluice_buffer.serving.committer import Committer
from sluice_buffer.serving.service import Service
from tests.unit.buffer.buffer_tools import LocalBuffer, make_group, make_job

LIMIT = barren_limit(4)
FAILED: dict[str, Any] = {
    "status": common.SAMPLE_STATUS_FAILED,
    "reward": None,
    "error": "reward.py:score raised KeyError: 'answer'",
}
# The context of a call that is not refused.
UNUSED: Any = None


class Gate:
    """Writes of a storage that begin when they are let through."""

    def __init__(self, buffer: LocalBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write, self._allowed = buffer.core.storage.write, threading.Semaphore(0)
        self.begun = 0
        monkeypatch.setattr(buffer.core.storage, "write", self._gated)

    def _gated(self, *arguments: Any) -> None:
        self.begun += 1
        assert self._allowed.acquire(timeout=60)
        self._write(*arguments)

    def let_through(self, writes: int) -> None:
        self._allowed.release(writes)

    async def until_begun(self, writes: int) -> None:
        while self.begun < writes:
            await asyncio.sleep(0.001)


async def test_a_verdict_is_told_once_its_failures_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = LocalBuffer(make_job(tmp_path, rows=200), tmp_path / "storage")
    for _ in range(LIMIT - 1):
        buffer.submit(*buffer.lease(), **FAILED)
    (last,) = buffer.lease()
    gate, committer = Gate(buffer, monkeypatch), Committer(buffer.core)
    service = Service(committer, Budget(1 << 20))
    change = lambda: buffer.core.memory.count("rewinds")  # noqa: E731 - any change
    changes: list[Awaitable[object]] = [asyncio.create_task(committer.run(change))]
    await gate.until_begun(1)
    caller = pb.Caller(name="trainer", attempt=1)
    request = pb.TakeBatchRequest(trainer=caller, step=1, data_parallel_size=1, wait_seconds=60)
    taking = asyncio.create_task(service.TakeBatch(request, UNUSED))
    changes.append(asyncio.create_task(committer.run(change)))
    await asyncio.sleep(0)
    gate.let_through(1)
    await gate.until_begun(2)  # the call's first look is in it; the last group fails after it
    failed = make_group(last.prompt, **FAILED).SerializeToString()
    changes.append(asyncio.create_task(committer.run(lambda: buffer.core.submit(failed))))
    await asyncio.sleep(0)
    assert buffer.core.dead_end()
    gate.let_through(1)
    await gate.until_begun(3)
    await asyncio.wait([taking], timeout=0.2)
    assert not taking.done(), "its last failure is not on the disk yet"
    gate.let_through(100)
    answer = await asyncio.wait_for(taking, 60)
    failures = await service.GetFailures(pb.GetFailuresRequest(after=0), UNUSED)
    await asyncio.gather(*changes)
    await committer.close()
    buffer.close()
    assert answer.state == pb.TakeBatchResponse.STATE_FAILED
    assert f"{LIMIT} groups in a row failed" in answer.waiting_for
    assert [failure.serial for failure in failures.failures] == list(range(1, LIMIT + 1))
