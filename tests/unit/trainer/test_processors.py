"""How many threads a rank may have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sluice_trainer.processors import usable_processors


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        pytest.param("max 100000", 8, id="no limit"),
        pytest.param("350000 100000", 3, id="a limit of 3.5"),
        pytest.param("50000 100000", 1, id="a limit of half a processor"),
        pytest.param("6400000 100000", 8, id="a limit above what there is"),
        pytest.param(None, 8, id="no cgroup"),
    ],
)
def test_a_container_with_a_limit_has_that_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    file = tmp_path / "cpu.max"
    if quota:
        file.write_text(f"{quota}\n")
    assert usable_processors(file) == expected
