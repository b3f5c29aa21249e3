"""What a backend can train, as far as config.json shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJobSpec
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model.families import check_family
from tests.vision_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def spec(model: Path, **data: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"prompts": [{"path": "train.jsonl"}], **data},
            "reward": {"type": "exact_match"},
            "trainer": {"backend": "fsdp", "steps": 1},
        }
    )


def test_a_vision_language_model_is_trained_with_images(model: Path) -> None:
    check_family(spec(model, images={}), model)


def test_without_images_it_is_told_how_to_train_it(model: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'qwen2_5_vl' .*: set data.images: \{\} to train"
    ):
        check_family(spec(model), model)


def test_a_language_model_gets_no_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    check_family(spec(tmp_path), tmp_path)
    with pytest.raises(ConfigurationError, match="'qwen3' cannot be trained with images"):
        check_family(spec(tmp_path, images={}), tmp_path)
