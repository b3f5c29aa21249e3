"""A job with images names what it cannot use yet, one problem at a time."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sluice.api import RLJobSpec

LORA = {"rank": 8, "alpha": 16}


def spec(**groups: Any) -> RLJobSpec:
    document: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"prompts": [{"path": "train.jsonl"}], "images": {}},
        "reward": {"type": "exact_match"},
        "trainer": {"backend": "fsdp", "steps": 1},
    }
    for group, fields in groups.items():
        document[group] = document.get(group, {}) | fields if fields else fields
    return RLJobSpec.model_validate(document)


def test_a_job_with_images_needs_one_field() -> None:
    images = spec().data.images
    assert images is not None
    assert (images.max_per_prompt, images.max_pixels) == (16, 1_003_520)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        pytest.param(
            {"rollout": {"engine": "vllm"}}, "leave rollout.engine out", id="another engine"
        ),
        pytest.param(
            {
                "rollout": {"pool": "shared", "mode": "async", "maxStaleness": 1},
                "trainer": {"lora": LORA},
                "weightSync": {"lora": "adapter", "pauseMode": "versions"},
            },
            "engines of a pool get no images: with data.images leave rollout.pool out",
            id="a pool",
        ),
        pytest.param(
            {"reward": {"type": None, "model": {"url": "http://reward:8000"}}},
            "a reward model gets no images",
            id="a reward model",
        ),
        pytest.param(
            {"debug": {"replay": "/rollouts"}},
            "dumped rollouts name their images and do not hold them",
            id="a replay",
        ),
        pytest.param(
            {"trainer": {"backend": "megatron"}},
            "with data.images set trainer.backend: fsdp",
            id="Megatron",
        ),
        pytest.param(
            {"trainer": {"lora": LORA, "freeze": []}}, "leave freeze or lora out", id="both"
        ),
        pytest.param(
            {"algorithm": {"loss": {"type": "dpo"}}, "reward": None},
            "preferences cannot have images yet",
            id="pairs of answers",
        ),
        pytest.param(
            {"data": {"images": None}, "trainer": {"freeze": ["vision"]}},
            "set data.images, or leave it out",
            id="parts of a language model",
        ),
    ],
)
def test_what_cannot_be_used_with_images_is_refused(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        spec(**groups)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("freeze", "trained"),
    [(None, set()), ([], {"vision", "projector"}), (["vision"], {"projector"})],
    ids=["default", "none", "vision"],
)
def test_parts_that_are_not_frozen_are_trained(freeze: Any, trained: set[str]) -> None:
    assert spec(trainer={"freeze": freeze}).trainer.trained_parts == trained
