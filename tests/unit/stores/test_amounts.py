"""Bytes in words."""

from __future__ import annotations

import pytest

from sluice.stores.amounts import progress_text, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (3_200_000, "3.2 MB"), (61.4e9, "61.4 GB"),
     (2e15, "2000.0 TB")],
)  # fmt: skip
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("done", "total", "rate", "text"),
    [
        (41_000_000_000, 61_400_000_000, 1.2e9, "41.0 of 61.4 GB, 1.2 GB/s"),
        (0, 61_400_000_000, 0.0, "0.0 of 61.4 GB"),
        (12, 812, 0.0, "12 of 812 B"),
        (5_000_000, 0, 2000.0, "5.0 MB, 2.0 kB/s"),
    ],
)
def test_progress(done: int, total: int, rate: float, text: str) -> None:
    assert progress_text(done, total, rate) == text
