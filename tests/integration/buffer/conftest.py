import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_job


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., BufferProcess]]:
    """Makes buffers as processes, which are killed after the test."""
    started: list[BufferProcess] = []

    def make(environment: dict[str, str] | None = None, **changes: Any) -> BufferProcess:
        server = BufferProcess(make_job(tmp_path, **changes), tmp_path, **(environment or {}))
        started.append(server)
        return server

    yield make
    for server in started:
        if server.process:
            server.process.kill()
            server.process.wait(10)


@pytest.fixture
async def client(make_server: Callable[..., BufferProcess]) -> AsyncIterator[Client]:
    """A client of a buffer with the default job."""
    async with Client(make_server().start()) as client:
        yield client


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    directory = tmp_path / "storage"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(directory)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)
