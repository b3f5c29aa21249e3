"""Jobs whose rows have images, of slime and verl."""

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from sluice.api import RLJob
from tests.unit.migrate.import_tools import run, slime, spec_of, unwrapped, verl

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
IMAGES = "data.image_key=images"
VERL = "trainer.total_epochs=1 trainer.n_gpus_per_node=4 custom_reward_function.path=/r.py"


def imported(words: str) -> tuple[dict[str, Any], str]:
    """The spec, which must be valid, and the notes."""
    result = verl(f"{VERL} {words}")
    spec = spec_of(result)
    RLJob.model_validate(YAML(typ="safe").load(result.stdout))
    return spec, unwrapped(result)


@pytest.mark.parametrize(
    ("setting", "checked"),
    [
        (IMAGES, False),
        ("data.train_files=/d/geo3k/train.parquet", True),
        ("actor_rollout_ref.model.path=/m/Some-VL-7B", True),
    ],
    ids=["a column", "the data", "the model"],
)
def test_rows_with_images_make_a_vision_job(setting: str, checked: bool) -> None:
    spec, notes = imported(setting)
    assert spec["data"]["images"] == {}
    assert "imagesKey" not in spec["data"]["prompts"][0]
    assert spec["trainer"]["backend"] == "fsdp"
    assert ("leave it out if they are text" in notes) is checked


def test_a_job_of_text_has_no_images() -> None:
    spec, _ = imported("")
    assert "images" not in spec["data"]
    assert "freeze" not in spec["trainer"]


def test_limits_and_the_column_are_translated() -> None:
    words = (
        f"data.image_key=pics data.val_files=/d/val.parquet trainer.test_freq=5 "
        f"{ROLLOUT}.limit_images=3 +data.mm_processor_kwargs.max_pixels=200704"
    )
    spec, notes = imported(words)
    assert spec["data"]["images"] == {"maxPerPrompt": 3, "maxPixels": 200704}
    assert spec["data"]["prompts"][0]["imagesKey"] == "pics"
    assert spec["evaluation"]["datasets"][0]["imagesKey"] == "pics"
    assert "does not know" not in notes


@pytest.mark.parametrize(
    ("words", "freeze"),
    [
        ("", []),
        (f"{ACTOR}.freeze_vision_tower=False", []),
        (f"{ACTOR}.freeze_vision_tower=True", None),
        ("actor_rollout_ref.model.lora_rank=8", None),
    ],
    ids=["default", "trained", "frozen", "adapter"],
)
def test_the_tower_is_trained_as_in_verl(words: str, freeze: list[str] | None) -> None:
    spec, _ = imported(f"{IMAGES} {words}")
    assert spec["trainer"].get("freeze") == freeze


def test_the_engine_takes_images() -> None:
    spec, notes = imported(f"{IMAGES} {ROLLOUT}.name=vllm {ROLLOUT}.gpu_memory_utilization=0.5")
    assert "engine" not in spec["rollout"]
    assert spec["rollout"]["engineArgs"] == {"mem-fraction-static": 0.5}
    assert "vLLM gets no images from sluice" in notes


def test_megatron_is_replaced() -> None:
    words = f"{IMAGES} {ACTOR}.strategy=megatron {ACTOR}.megatron.tensor_model_parallel_size=2"
    spec, notes = imported(words)
    assert spec["trainer"]["backend"] == "fsdp"
    assert "parallelism" not in spec["trainer"]
    assert "fsdp: Megatron trains language models alone" in notes


@pytest.mark.parametrize("key", ["video_key", "audio_key"])
def test_other_media_are_reported(key: str) -> None:
    spec, notes = imported(f"data.{key}=columns")
    assert "sluice reads no video and no sound" in notes
    assert "images" not in spec["data"]


def test_given_answers_may_have_images() -> None:
    words = (
        "python -m verl.trainer.sft_trainer data.train_files=/d/a model.path=/m/x-vl-2b "
        "data.image_key=pictures"
    )
    result = run("verl", words)
    spec = spec_of(result)
    RLJob.model_validate(YAML(typ="safe").load(result.stdout))
    assert spec["algorithm"]["loss"]["type"] == "sft"
    assert spec["data"]["images"] == {}
    assert spec["data"]["prompts"][0]["imagesKey"] == "pictures"
    assert (spec["trainer"]["backend"], spec["trainer"]["freeze"]) == ("fsdp", [])
    assert "data.image_key" not in unwrapped(result)


SLIME = "--label-key label --apply-chat-template --actor-num-nodes 1 --actor-num-gpus-per-node 4"


@pytest.mark.parametrize(
    ("keys", "column"), [({"image": "images"}, None), ({"image": "pics"}, "pics")], ids=str
)
def test_multimodal_keys_of_slime(tmp_path: Path, keys: dict[str, str], column: str | None) -> None:
    result = slime(
        tmp_path, f"{SLIME} --tensor-model-parallel-size 2 --multimodal-keys '{json.dumps(keys)}'"
    )
    spec = spec_of(result)
    RLJob.model_validate(YAML(typ="safe").load(result.stdout))
    assert spec["data"]["images"] == {}
    assert spec["data"]["prompts"][0].get("imagesKey") == column
    assert spec["trainer"]["backend"] == "fsdp"
    assert "parallelism" not in spec["trainer"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('{"video": "clips"}', "sluice reads no video and no sound"),
        ("images", "expected a JSON object such as"),
        ('["image"]', "expected a JSON object such as"),
    ],
    ids=["video", "no JSON", "a list"],
)
def test_other_multimodal_keys_are_reported(tmp_path: Path, keys: str, said: str) -> None:
    result = slime(tmp_path, f"{SLIME} --multimodal-keys '{keys}'")
    assert said in unwrapped(result)
    assert "images" not in spec_of(result)["data"]
