"""The shape of a model from its config.json, and models and layouts that are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from sluice.api import Parallelism
from sluice_trainer.megatron.model.config import check_layout, transformer_config
from sluice_trainer.model.huggingface_config import ModelShape, read_shape
from sluice_trainer.model.rope import Rope
from sluice_trainer.model.unsupported import UnsupportedModelError, check_tied

BASE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 131,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}

MIXTURE = {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}


def shape(path: Path, **changes: object) -> ModelShape:
    (path / "config.json").write_text(json.dumps({**BASE, **changes}))
    return read_shape(path)


def test_qwen3_has_head_norms_and_no_biases(tmp_path: Path) -> None:
    model = shape(tmp_path)
    assert (model.qk_norm, model.qkv_bias, model.head_dim, model.tied) == (True, False, 32, False)
    assert model.rope == Rope(1e6)


def test_qwen2_has_biases(tmp_path: Path) -> None:
    model = shape(tmp_path, model_type="qwen2", head_dim=None, tie_word_embeddings=True)
    assert (model.qk_norm, model.qkv_bias, model.head_dim, model.tied) == (False, True, 16, True)


def test_rope_is_read_from_the_parameters_of_transformers_5(tmp_path: Path) -> None:
    assert shape(
        tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    ).rope == Rope(5e5)


def test_rope_is_read_from_the_scaling_of_llama_3_1(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    assert shape(tmp_path, model_type="llama", rope_scaling=scaling).rope == Rope(
        1e6, "llama3", 8.0, 1.0, 4.0, 4096
    )


def test_layers_may_be_dense_or_mixtures(tmp_path: Path) -> None:
    model = shape(tmp_path, **MIXTURE, use_qk_norm=True)
    assert model.experts is not None
    assert [model.is_mixture(layer) for layer in range(2)] == [False, True]
    assert (model.experts.shared_ffn, model.experts.scaling, model.experts.score) == (
        64,
        2.5,
        "sigmoid",
    )
    assert (model.qk_norm, model.rope_dim) == (True, 16)


def test_every_other_layer_may_be_a_mixture(tmp_path: Path) -> None:
    sizes = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
    }
    model = shape(
        tmp_path, model_type="qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], **sizes
    )
    assert [model.is_mixture(layer) for layer in range(5)] == [False, True, False, False, False]


def test_yarn_stretches_slow_channels_only() -> None:
    plain = Rope(1e4).inverse_frequencies(32)
    yarn = Rope(1e4, "yarn", 4.0, original_max_positions=4096).inverse_frequencies(32)
    assert torch.equal(yarn[:2], plain[:2])
    assert torch.allclose(yarn[-1], plain[-1] / 4)


def test_linear_scaling_stretches_all_waves() -> None:
    plain, stretched = (
        Rope(1e4).inverse_frequencies(8),
        Rope(1e4, "linear", 4.0).inverse_frequencies(8),
    )
    assert torch.equal(stretched, plain / 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (MIXTURE, "experts"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "kind linear"),
    ],
    ids=["a mixture", "scaled positions"],
)
def test_a_deterministic_trainer_refuses_models_that_the_engine_computes_differently(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    model = shape(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=f"trainer.deterministic: .* {reason}"):
        transformer_config(model, Parallelism(), dtype=torch.bfloat16, deterministic=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' cannot be trained with trainer.backend: megatron, which supports "
            "llama, qwen2, qwen3, qwen3_moe, .*; set trainer.backend: fsdp, which trains",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_type 'longrope'.*; set trainer.backend: fsdp",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantized weights cannot be trained: run `sluice convert dequantize ",
        ),
        (
            MIXTURE | {"norm_topk_prob": False},
            "norm_topk_prob: false is not supported with sigmoid routing",
        ),
        (MIXTURE | {"n_group": 4, "topk_group": 1}, "num_experts_per_tok / topk_group must be 2"),
        ({"attention_bias": True}, "attention_bias.*; set trainer.backend: fsdp"),
        ({"use_sliding_window": True}, "sliding-window.*; set trainer.backend: fsdp"),
    ],
    ids=[
        "family",
        "rotary scaling",
        "quantized",
        "unnormalised sigmoid routing",
        "group limit",
        "attention bias",
        "sliding window",
    ],
)
def test_the_reason_why_a_model_cannot_be_trained_is_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        shape(tmp_path, **changes)


def test_an_engine_that_does_not_tie_the_embedding_is_named(tmp_path: Path) -> None:
    tied = shape(tmp_path, **MIXTURE | {"tie_word_embeddings": True})
    check_tied(tied.tied, tied.model_type, ["qwen2"], "sglang")
    with pytest.raises(
        UnsupportedModelError, match=r"tie_word_embeddings with model_type .* not supported: sglang"
    ):
        check_tied(tied.tied, tied.model_type, [tied.model_type], "sglang")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no config\.json"):
        read_shape(tmp_path)


def test_vocabulary_is_padded_to_split_evenly(tmp_path: Path) -> None:
    assert shape(tmp_path).padded_vocab(1) == 131
    assert shape(tmp_path).padded_vocab(4) == 132


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, {"tensor": 4}, "parallelism.tensor 4 must divide the 2 key/value heads"),
        (
            {"intermediate_size": 129},
            {"tensor": 2},
            "must divide the 129 channels of the feed-forward layers",
        ),
        ({}, {"pipeline": 3}, "parallelism.pipeline 3 must divide the 2 layers into equal stages"),
        (
            {},
            {"pipeline": 2, "virtualPipeline": 2},
            "pipeline x virtualPipeline 4 must divide the 2 layers",
        ),
        ({}, {"expert": 2}, "parallelism.expert 2: qwen3 has no experts"),
        (MIXTURE, {"expert": 3}, "parallelism.expert 3 must divide the 8 experts"),
    ],
    ids=[
        "tensor by heads",
        "tensor by channels",
        "pipeline",
        "virtual pipeline",
        "no experts",
        "experts",
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, object], layout: dict[str, int], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        transformer_config(
            shape(tmp_path, **changes), Parallelism.model_validate(layout), dtype=torch.float32
        )


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"key/value heads; .*equal stages"):
        transformer_config(shape(tmp_path), Parallelism(tensor=4, pipeline=3), dtype=torch.float32)


@pytest.mark.parametrize(
    ("layers", "ends", "problem"),
    [
        pytest.param(5, {"firstStageLayers": 1}, "", id="1 2 2"),
        pytest.param(5, {"firstStageLayers": 1, "lastStageLayers": 2}, "", id="1 2 2 by its ends"),
        pytest.param(
            6,
            {"lastStageLayers": 1},
            "trainer.parallelism.lastStageLayers 1 of 6 layers leave 5 for 2 equal stages",
            id="an odd number is left",
        ),
        pytest.param(
            4,
            {"firstStageLayers": 2, "lastStageLayers": 2},
            "trainer.parallelism.firstStageLayers 2 and trainer.parallelism.lastStageLayers 2 of 4 "
            "layers leave 0 for 1 equal stages",
            id="no layer is left",
        ),
    ],
)
def test_stages_of_unequal_sizes_must_hold_all_layers(
    tmp_path: Path, layers: int, ends: dict[str, int], problem: str
) -> None:
    parallelism = Parallelism.model_validate({"pipeline": 3, **ends})
    model = shape(tmp_path, num_hidden_layers=layers)
    if not problem:
        check_layout(model, parallelism)
        return
    with pytest.raises(UnsupportedModelError) as refused:
        check_layout(model, parallelism)
    assert problem in str(refused.value)
