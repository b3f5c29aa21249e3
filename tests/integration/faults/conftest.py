"""Runs of the quickstart to hurt, and the tools of the buffer's tests."""

from pathlib import Path

import pytest

from tests.integration.faults.native import library
from tests.integration.run.conftest import example, laptop

__all__ = ["example", "laptop"]


@pytest.fixture
def calendar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the clock error, in seconds, of processes that start from now on."""
    offset = tmp_path / "clock-offset"
    offset.write_text("0")
    monkeypatch.setenv("CLOCK_OFFSET", str(offset))
    monkeypatch.setenv("LD_PRELOAD", str(library("clock")))
    return offset
