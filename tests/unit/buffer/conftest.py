from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.buffer.buffer_tools import House, make_job


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    """Makes buffers on a real database in this process."""
    houses: list[House] = []

    def make(**changes: Any) -> House:
        directory = tmp_path / f"house-{len(houses)}"
        directory.mkdir()
        houses.append(House(make_job(directory, **changes), directory / "storage"))
        return houses[-1]

    yield make
    for one in houses:
        one.close()
