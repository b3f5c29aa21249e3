from __future__ import annotations

import sys

import pytest

from benchmarks.processes import Server
from sluice.engines.sglang.client import Client
from sluice.runtime.pod_env import free_port


async def test_a_server_that_ends_at_its_start_is_not_waited_for() -> None:
    server = Server([sys.executable, "-c", "raise SystemExit('no such model')"], {})
    async with Client(f"http://127.0.0.1:{free_port()}") as engine:
        with pytest.raises(RuntimeError, match="ended with 1:\nno such model"):
            await server.ready(engine, 60)
    server.output.close()
