"""Checkpoints are quantized as they are released, to the bit, and can be made bf16 again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from sluice.engines.plugin_common.precision import is_quantized
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model.dequantize import dequantize
from sluice_trainer.model.quantize import (
    fp8_blocks,
    fp8_rows,
    int8_rows,
    quantize,
    quantized,
)
from tests.integration.engines import save_model


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (200, 300), (3, 5)])
def test_blocks_are_scaled_by_their_largest_value(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(rows, columns).bfloat16()
    parts = fp8_blocks(weight)
    assert parts["weight"].shape == (rows, columns)
    for i, row in enumerate(range(0, rows, 128)):
        for j, column in enumerate(range(0, columns, 128)):
            block = slice(row, row + 128), slice(column, column + 128)
            scale = weight[block].float().abs().max() / 448
            assert parts["weight_scale_inv"][i, j] == scale
            expected = (weight[block].float() / scale).to(torch.float8_e4m3fn)
            assert torch.equal(parts["weight"][block].float(), expected.float())


def test_a_block_of_zeros_stays_zero() -> None:
    parts = fp8_blocks(torch.zeros(4, 4))
    assert torch.equal(parts["weight"].float() * parts["weight_scale_inv"], torch.zeros(4, 4))


def test_rows_are_rounded_to_the_nearest_code() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.003], [0.0, 0.0, 0.0]])
    parts = int8_rows(weight)
    assert parts["weight"].tolist() == [[127, -64, 0], [0, 0, 0]]
    assert float(parts["weight_scale"][0]) == pytest.approx(1 / 127)


@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.3.mlp.experts.17.down_proj.weight", True),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.language_model.layers.1.mlp.up_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", False),
    ],
)
def test_matrices_of_layers_are_quantized(name: str, matrix: bool) -> None:
    assert is_quantized(name) is matrix


@pytest.mark.parametrize("precision", ["fp8", "fp8_block", "int8"])
def test_half_the_bytes_of_a_bf16_model_travel(precision: str) -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]
    tensors = [(name, torch.randn(512, 256).bfloat16()) for name in names]
    embedding, *parts = quantized(tensors, precision)
    assert embedding[1] is tensors[0][1]
    size = sum(part.nbytes for _, part in parts)
    assert 0.5 <= size / tensors[1][1].nbytes < 0.51


def test_rows_of_fp8_use_its_whole_range() -> None:
    weight = torch.randn(3, 5)
    parts = fp8_rows(weight)
    assert parts["weight"].float().abs().amax(1).tolist() == [448.0] * 3
    assert _error(parts["weight"].float() * parts["weight_scale"], weight) < 0.04


@pytest.mark.parametrize(("form", "bound"), [("fp8-block", 0.04), ("fp8", 0.04), ("int8", 0.01)])
def test_a_model_can_be_quantized_and_made_bf16_again(
    tmp_path: Path, form: str, bound: float
) -> None:
    source = save_model(tmp_path / "model", seed=1, tie_word_embeddings=False)
    quantize(source, tmp_path / "quantized", form)
    config = json.loads((tmp_path / "quantized/config.json").read_text())
    described = json.dumps(config["quantization_config"])
    assert '"lm_head"' in described
    assert "q_proj" not in described
    stored = load_file(tmp_path / "quantized/model.safetensors")
    before = load_file(source / "model.safetensors")
    assert {name for name in before if is_quantized(name)} <= stored.keys()
    assert torch.equal(stored["lm_head.weight"], before["lm_head.weight"])
    dequantize(tmp_path / "quantized", tmp_path / "plain")
    after = load_file(tmp_path / "plain/model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert _error(after[name], tensor) < (bound if is_quantized(name) else 1e-9), name
    with pytest.raises(ConfigurationError, match="is quantized already: `sluice convert dequant"):
        quantize(tmp_path / "quantized", tmp_path / "again", form)


def _error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, by that of the values."""
    difference = (actual.float() - expected.float()).square().mean().sqrt()
    return float(difference / expected.float().square().mean().sqrt().clamp(min=1e-12))


def test_a_checkpoint_without_matrices_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, source / "model.safetensors")
    with pytest.raises(ConfigurationError, match="has no matrix of a layer"):
        quantize(source, tmp_path / "quantized", "int8")
    assert not (tmp_path / "quantized").exists()


@pytest.mark.parametrize("form", ["fp8-block", "int8"])
def test_transformers_loads_a_quantized_model(tmp_path: Path, form: str) -> None:
    shape: dict[str, Any] = {
        "tie_word_embeddings": False,
        "hidden_size": 128,
        "intermediate_size": 256,
    }
    source, other = (save_model(tmp_path / f"{seed}", seed, **shape) for seed in (1, 2))
    quantize(source, tmp_path / "quantized", form)
    # On a CPU transformers computes with blocks of FP8 only after its own conversion to bf16.
    settings = FineGrainedFP8Config(dequantize=True) if form == "fp8-block" else None
    loaded, before, unrelated = (
        _log_probs(directory, quantization_config=quantization)
        for directory, quantization in (
            (tmp_path / "quantized", settings),
            (source, None),
            (other, None),
        )
    )
    assert 0 < float((loaded - before).abs().max()) < 1
    assert float((unrelated - before).abs().max()) > 5


@torch.no_grad()
def _log_probs(directory: Path, **options: Any) -> Tensor:
    given = {name: value for name, value in options.items() if value is not None}
    model = AutoModelForCausalLM.from_pretrained(directory, **given)
    log_probs: Tensor = model(torch.arange(5, 11)[None]).logits.float().log_softmax(-1)
    return log_probs
