from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.buffer.buffer_tools import LocalBuffer, make_job


@pytest.fixture
def make_buffer(tmp_path: Path) -> Iterator[Callable[..., LocalBuffer]]:
    """Makes buffers in this process, each on a database of its test."""
    buffers: list[LocalBuffer] = []

    def make(**changes: Any) -> LocalBuffer:
        directory = tmp_path / f"buffer-{len(buffers)}"
        directory.mkdir()
        buffers.append(LocalBuffer(make_job(directory, **changes), directory / "storage"))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()
