"""Weights in a directory: two attempts of a trainer neither write nor remove each other's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.engines.sglang.layout import Layout
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.disk import Disk, VersionDirectories


async def write(disk: Disk, version: int) -> None:
    for bucket in buckets([("a", torch.ones(4)), ("b", torch.ones(4))], 16, Layout()):
        await disk.stage(bucket, version)


async def test_an_older_attempt_does_not_touch_the_weights_of_a_newer_one(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    older, newer = (Disk(VersionDirectories(weights, n), tmp_path, drawn=False) for n in (1, 2))
    await write(newer, 5)
    await write(older, 5)
    names = [f"version_0000005.attempt{attempt}" for attempt in (1, 2)]
    assert sorted(path.name for path in weights.iterdir()) == names
    await write(newer, 6)
    assert [path.name for path in weights.iterdir()] == ["version_0000006.attempt2"]


@pytest.mark.parametrize("drawn", [False, True])
async def test_a_version_has_the_tensors_that_are_not_trained(tmp_path: Path, drawn: bool) -> None:
    model = tmp_path / "model"
    model.mkdir()
    source = {"a": torch.zeros(4), "b": torch.zeros(4), "visual.c": torch.full((2,), 3.0)}
    save_file(source, model / "model.safetensors")
    disk = Disk(VersionDirectories(tmp_path / "weights", 1), model, drawn=drawn)
    for version in (1, 2):
        await write(disk, version)
    (path,) = (tmp_path / "weights").iterdir()
    found = {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == found.keys() == source.keys() - ({"visual.c"} if drawn else set())
    assert all(name in load_file(path / file) for name, file in index.items())
    assert torch.equal(found["a"], torch.ones(4))
    assert drawn or torch.equal(found["visual.c"], source["visual.c"])
