"""What a backend can train, as far as config.json shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJobSpec
from sluice.api.groups.trainer import Mtp
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model.families import check_family, check_speculative
from tests.vision_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def spec(
    model: Path, lora: dict[str, Any] | None = None, mode: str = "in_place", **data: Any
) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"prompts": [{"path": "train.jsonl"}], **data},
            "reward": {"type": "exact_match"},
            "trainer": {"backend": "fsdp", "steps": 1, "lora": lora},
            "weightSync": {"lora": "merged" if lora is None else "adapter", "pauseMode": mode},
        }
    )


def test_a_vision_language_model_is_trained_with_images(model: Path) -> None:
    check_family(spec(model, images={}), model)


def test_engines_find_what_they_propose_tokens_with(tmp_path: Path) -> None:
    def speculative(**settings: Any) -> RLJobSpec:
        other = spec(tmp_path).model_dump(by_alias=True, exclude_unset=True)
        return RLJobSpec.model_validate(other | {"rollout": {"speculative": settings}})

    shape = {"model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    index = tmp_path / "model.safetensors.index.json"
    names = ["model.layers.1.mlp.up_proj.weight"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "f")}))
    check_speculative(speculative(algorithm="ngram"), tmp_path)
    with pytest.raises(ConfigurationError, match="no layers that predict further tokens"):
        check_speculative(speculative(algorithm="mtp"), tmp_path)
    job = spec(tmp_path)
    trained = job.model_copy(update={"trainer": job.trainer.model_copy(update={"mtp": Mtp()})})
    with pytest.raises(ConfigurationError, match=r"which trainer\.mtp trains: leave it out"):
        check_speculative(trained, tmp_path)
    for further in ("model.layers.2.eh_proj.weight", "mtp.fc.weight"):
        index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, further], "f")}))
        check_speculative(speculative(algorithm="mtp"), tmp_path)
    draft = tmp_path / "draft"
    with pytest.raises(ConfigurationError, match="expected a Hugging Face checkpoint"):
        check_speculative(speculative(algorithm="draft", model=str(draft)), tmp_path)
    draft.mkdir()
    (draft / "config.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ConfigurationError, match=r"has 9 tokens .*, expected the 8"):
        check_speculative(speculative(algorithm="draft", model=str(draft)), tmp_path)


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


RECURRENT = ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z"]


@pytest.mark.parametrize(
    ("kind", "mode", "lora", "refused"),
    [
        pytest.param("qwen3_5", "versions", {}, ", ".join(RECURRENT), id="all layers"),
        pytest.param("qwen3_5_moe", "versions", {}, ", ".join(RECURRENT), id="a mixture"),
        pytest.param(
            "qwen3_5", "versions", {"targetModules": ["in_proj_z"]}, "in_proj_z", id="one named"
        ),
        pytest.param("qwen3_next", "versions", {}, "in_proj_ba", id="other names"),
        pytest.param("qwen3_5", "versions", {"excludeModules": RECURRENT}, "", id="left out"),
        pytest.param("qwen3_5", "in_place", {}, "", id="added to the weights"),
        pytest.param("qwen3_vl", "versions", {}, "", id="attention alone"),
    ],
)
def test_versions_of_recurrent_layers_are_refused(
    kind: str, mode: str, lora: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    if not refused:
        check_family(spec(tmp_path, lora, mode), tmp_path, quickly=True)
        return
    with pytest.raises(ConfigurationError, match=f"no adapters of {refused} in a model of type"):
        check_family(spec(tmp_path, lora, mode), tmp_path, quickly=True)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"quantization_config": {"quant_method": "fp8"}}, id="language model"),
        pytest.param(
            {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, id="multimodal"
        ),
    ],
)
def test_a_quantized_model_gets_the_command_that_converts_it(
    tmp_path: Path, backend: str, config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    job = spec(tmp_path)
    job = job.model_copy(update={"trainer": job.trainer.model_copy(update={"backend": backend})})
    command = f"(fp8), .* run `sluice convert dequantize {tmp_path} {tmp_path}-bf16`"
    with pytest.raises(ConfigurationError, match=command.replace("(fp8)", r"\(fp8\)")):
        check_family(job, tmp_path, quickly=True)


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match=r"config\.json: expected an object"):
        check_family(spec(tmp_path), tmp_path, quickly=True)
