"""A job's certificates on a machine whose clock is wrong.

An hour does no harm, and the error for days names the clock.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.wire import rpc, tls
from sluice_operator.cluster.keys import JobKeys, new_key

HOUR, DAY = 3600, 86400
NAME = "demo.default.sluice"
CLIENT = """
import asyncio, sys
from sluice.wire import rpc, tls
from sluice.wire.v1 import buffer_pb2, buffer_pb2_grpc

async def main():
    async with rpc.channel(sys.argv[1], tls.from_environment()) as channel:
        stub = buffer_pb2_grpc.BufferStub(channel)
        call = lambda: stub.Stats(buffer_pb2.StatsRequest(), timeout=5)
        try:
            await rpc.retrying(call, what="Stats", seconds=20)
        except Exception as error:
            print(error)

asyncio.run(main())
"""
# Answer of a server without services once the certificates are agreed upon.
REACHED = "Method not found"


@pytest.mark.parametrize(
    ("offset", "answer"),
    [
        pytest.param(-HOUR, REACHED, id="an hour before the certificate was made"),
        pytest.param(HOUR, REACHED, id="an hour later"),
        pytest.param(
            -2 * DAY, "not valid yet by this machine's clock: is the clock right?", id="days before"
        ),
        pytest.param(
            3651 * DAY,
            "no longer valid by this machine's clock: is the clock right?",
            id="ten years later",
        ),
    ],
)
async def test_a_client_with_a_wrong_clock(
    calendar: Path, tmp_path: Path, offset: int, answer: str
) -> None:
    for name, text in JobKeys(new_key()).certificates("default/demo", NAME).items():
        (tmp_path / name).write_text(text)
    variables = {"SLUICE_TLS_DIR": str(tmp_path), "SLUICE_TLS_NAME": NAME}
    server = rpc.server()
    port = rpc.bind(server, "127.0.0.1:0", tls.from_environment(variables))
    await server.start()
    try:
        calendar.write_text(str(offset))
        command = [sys.executable, "-c", CLIENT, f"127.0.0.1:{port}"]
        client = subprocess.Popen(
            command, env=os.environ | variables, stdout=subprocess.PIPE, text=True
        )

        output, _ = await asyncio.to_thread(client.communicate, timeout=60)
    finally:
        await server.stop(0)
    assert answer in output
