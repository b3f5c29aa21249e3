"""Weights in a directory: two attempts of a trainer neither write nor remove each other's."""

from __future__ import annotations

from pathlib import Path

import torch

from sluice.engines.sglang.layout import Layout
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.disk import Disk


async def write(disk: Disk, version: int) -> None:
    for bucket in buckets([("a", torch.ones(4)), ("b", torch.ones(4))], 16, Layout()):
        await disk.stage(bucket, version)


async def test_an_older_attempt_does_not_touch_the_weights_of_a_newer_one(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    older, newer = Disk(weights, tmp_path, 1), Disk(weights, tmp_path, 2)
    await write(newer, 5)
    await write(older, 5)
    names = [f"version_0000005.attempt{attempt}" for attempt in (1, 2)]
    assert sorted(path.name for path in weights.iterdir()) == names
    await write(newer, 6)
    assert [path.name for path in weights.iterdir()] == ["version_0000006.attempt2"]
