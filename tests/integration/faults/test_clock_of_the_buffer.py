"""The buffer's clock jumps by an hour.

Leases stay, and no evaluation takes an hour or a negative time.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from sluice.wire.v1 import buffer_pb2 as pb
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group, make_job

HOUR = 3600


@pytest.mark.parametrize("jump", [pytest.param(HOUR, id="forward"), pytest.param(-HOUR, id="back")])
async def test_the_clock_of_a_buffer_jumps(calendar: Path, tmp_path: Path, jump: int) -> None:
    job = make_job(
        tmp_path,
        evaluation={"everySteps": 1, "beforeTrain": True, "samplesPerPrompt": 2},
        buffer__leaseSeconds=8,
    )
    server = BufferProcess(job, tmp_path)
    server.start()
    try:
        async with Client(server.address) as client:
            held = (await client.lease(count=4)).groups  # the held-out prompts, and one to train on
            calendar.write_text(str(jump))
            await asyncio.sleep(3)  # the buffer looks for leases that ran out each second
            assert await client.heartbeat([lease.prompt for lease in held]) == []
            answers = await client.submit([make_group(lease.prompt) for lease in held])
            assert {answer.outcome for answer in answers.values()} == {
                pb.SubmitResponse.OUTCOME_STORED
            }
            [result] = (await client.evaluations()).evaluations
            assert (await client.stats()).counters["leases_expired"] == 0
        assert 0 < result.seconds < HOUR
    finally:
        server.end(signal.SIGKILL)
