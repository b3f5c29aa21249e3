"""Counts of what a trainer does with images, and the metrics made from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from sluice.images.processor import ImageProcessor
from sluice.samples.sample import Prompt, Sample, SampleGroup
from sluice_trainer.batch.image_work import ImageCounts, image_metrics
from sluice_trainer.batch.images import BatchImage, ExpandedSample, ImageExpansion
from sluice_trainer.fsdp.families import train_parts
from sluice_trainer.fsdp.vision import Tower
from sluice_trainer.model.flops import TowerFlops, tower_flops
from sluice_trainer.telemetry.recorder import time_metrics
from tests.vision_models import make_model, picture

CPU = torch.device("cpu")
IMAGES = {image.digest: image for image in (picture(64, 64, 1), picture(96, 64, 2))}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


@pytest.fixture
def expansion(directory: Path) -> ImageExpansion:
    return ImageExpansion(ImageProcessor(directory), lambda names: [IMAGES[n] for n in names])


@pytest.fixture
def images(expansion: ImageExpansion) -> list[BatchImage]:
    """Return two images, of which the first is in two samples."""
    pad = expansion._processor.placeholder
    first, second = IMAGES
    samples = [
        Sample(index=0, tokens=np.array([1, pad, 2], np.int32), images=[first]),
        Sample(index=1, tokens=np.array([pad, pad, 2], np.int32), images=[first, second]),
    ]
    (group,) = expansion.expand([SampleGroup(Prompt(0, ""), samples)])
    placed = []
    for sample in group.samples:
        assert isinstance(sample, ExpandedSample)
        placed += [place.image for sequence in sample.placed for place in sequence]
    assert len(placed) == 3
    return placed[1:]


def tower(directory: Path, *trained: str) -> tuple[Tower, TowerFlops]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory)
    model.requires_grad_(bool(trained))
    train_parts(model, trained)  # type: ignore[arg-type]
    flops = tower_flops(model.config.to_dict())
    assert flops is not None
    return Tower(model), flops


def forward(flops: TowerFlops, images: list[BatchImage]) -> float:
    return sum(flops.forward(image.rows, image.columns) for image in images)


def test_a_frozen_tower_works_once_for_all_passes(
    directory: Path, expansion: ImageExpansion, images: list[BatchImage]
) -> None:
    frozen, flops = tower(directory)
    for _ in range(4):
        frozen.features(images, CPU)
    counts = expansion.work.take()
    assert (counts.placed, counts.needed, counts.decoded) == (3, 8, 2)
    assert counts.tower_flops == forward(flops, images)
    assert counts.tower_seconds > 0
    assert counts.decode_seconds > 0
    assert expansion.work.take() == ImageCounts()


def test_log_prob_passes_of_a_trained_tower_do_not_count(
    directory: Path, expansion: ImageExpansion, images: list[BatchImage]
) -> None:
    trained, flops = tower(directory, "vision", "projector")
    with torch.no_grad():
        trained.features(images, CPU)
    assert expansion.work.counts.tower_flops == 0
    trained.features(images, CPU)
    counts = expansion.work.take()
    assert 2 * forward(flops, images) < counts.tower_flops < 3 * forward(flops, images)
    assert (counts.needed, counts.decoded) == (4, 2)


def test_metrics_are_sums_and_the_slowest_rank() -> None:
    ranks = [
        ImageCounts(placed=6, needed=8, decoded=2, decode_seconds=0.5, tower_seconds=2.0),
        ImageCounts(placed=2, needed=2, decoded=0, decode_seconds=0.1, tower_seconds=1.0),
    ]
    metrics = image_metrics(ranks)
    assert metrics == {
        "rollout/images": 8,
        "perf/image_decode_time": 0.5,
        "perf/tower_time": 2.0,
        "perf/image_cache_hit_ratio": 0.8,
    }
    times = time_metrics({"training": 3.0, "waiting": 1.0}, metrics | {"rollout/tokens": 8.0})
    assert (times["perf/images_per_second"], times["perf/tower_time_ratio"]) == (2, 0.5)


def test_a_step_without_images_has_no_share_of_hits() -> None:
    assert "perf/image_cache_hit_ratio" not in image_metrics([ImageCounts()])
    assert "perf/images_per_second" not in time_metrics({"training": 1.0}, {"rollout/tokens": 1.0})
