from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.buffer.buffer_tools import Client, Server, make_job


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Makes buffers in processes of their own; all are killed at the end."""
    started: list[Server] = []

    def make(environment: dict[str, str] | None = None, **changes: Any) -> Server:
        one = Server(make_job(tmp_path, **changes), tmp_path, **(environment or {}))
        started.append(one)
        return one

    yield make
    for one in started:
        if one.process:
            one.process.kill()
            one.process.wait(10)


@pytest.fixture
async def client(server: Callable[..., Server]) -> AsyncIterator[Client]:
    """A client of a buffer with the default job."""
    async with Client(server().start()) as client:
        yield client
