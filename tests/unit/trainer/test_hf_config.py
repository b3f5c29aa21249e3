"""config.json -> shape, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sluice.api import Parallelism
from sluice_trainer.megatron.hf_config import ModelShape, Rope, UnsupportedModelError, read_shape, transformer_config

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


def shape(path: Path, **changes: object) -> ModelShape:
    (path / "config.json").write_text(json.dumps({**BASE, **changes}))
    return read_shape(path)


def test_qwen3(tmp_path: Path) -> None:
    found = shape(tmp_path)
    assert (found.qk_norm, found.qkv_bias, found.head_dim, found.tied) == (True, False, 32, False)
    assert found.rope == Rope(1e6)


def test_qwen2_has_biases(tmp_path: Path) -> None:
    found = shape(tmp_path, model_type="qwen2", head_dim=None, tie_word_embeddings=True)
    assert (found.qk_norm, found.qkv_bias, found.head_dim, found.tied) == (False, True, 16, True)


def test_rope_of_transformers_5(tmp_path: Path) -> None:
    assert shape(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope == Rope(5e5)


def test_rope_of_llama_3_1(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    assert shape(tmp_path, model_type="llama", rope_scaling=scaling).rope == Rope(1e6, "llama3", 8.0, 1.0, 4.0, 4096)


def test_linear_scaling_stretches_all_waves() -> None:
    plain, stretched = Rope(1e4).inverse_frequencies(8), Rope(1e4, "linear", 4.0).inverse_frequencies(8)
    assert torch.equal(stretched, plain / 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' cannot be trained; supported are llama, qwen2, qwen3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
)
def test_what_cannot_be_trained_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        shape(tmp_path, **changes)


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no config\.json"):
        read_shape(tmp_path)


def test_vocabulary_is_padded_to_split_evenly(tmp_path: Path) -> None:
    assert shape(tmp_path).padded_vocab(1) == 131
    assert shape(tmp_path).padded_vocab(4) == 132


def test_heads_must_split_evenly(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="must divide the 2 key/value heads"):
        transformer_config(shape(tmp_path), Parallelism(tensor=4), dtype=torch.float32)


def test_what_the_model_cannot_be_split_by_yet(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"parallelism\.context"):
        transformer_config(shape(tmp_path), Parallelism(context=2), dtype=torch.float32)
