"""Quantized checkpoints become bf16 ones, as the code of each form's authors decodes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model.dequantize import dequantize

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
NAME = "model.layers.0.mlp.down_proj"


def write(directory: Path, tensors: dict[str, Tensor], quantization: Any) -> Path:
    directory.mkdir()
    config = {"model_type": "qwen3", "dtype": "float8", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


def converted(tmp_path: Path, tensors: dict[str, Tensor], quantization: Any) -> dict[str, Tensor]:
    source = write(tmp_path / "quantized", tensors, quantization)
    dequantize(source, tmp_path / "plain")
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert config == {"model_type": "qwen3", "dtype": "bfloat16"}
    assert (tmp_path / "plain/tokenizer.json").exists()
    return load_file(tmp_path / "plain/model.safetensors")


def test_fp8_in_blocks_that_do_not_fill_the_matrix(tmp_path: Path) -> None:
    """As DeepSeek-V3 is released: a scale for each block of 128 x 128, the last ones cut."""
    torch.manual_seed(0)
    weight = torch.randn(200, 300) * torch.logspace(-3, 3, 300)
    codes, scales = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty(2, 3)
    expected = torch.empty_like(weight)
    for i in range(2):
        for j in range(3):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            expected[block] = codes[block].float() * scales[i, j]
    norm = torch.rand(7, dtype=torch.bfloat16)
    tensors = {
        f"{NAME}.weight": codes,
        f"{NAME}.weight_scale_inv": scales,
        "model.norm.weight": norm,
    }
    result = converted(tmp_path, tensors, FP8)
    assert result.keys() == {f"{NAME}.weight", "model.norm.weight"}
    assert torch.equal(result[f"{NAME}.weight"], expected.bfloat16())
    assert torch.equal(result["model.norm.weight"], norm)
    error = (result[f"{NAME}.weight"].float() - weight).abs() / weight.abs().amax(0)
    assert float(error.max()) < 0.07, "three bits of mantissa"


def test_mxfp4_as_transformers_decodes_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 6, 2), dtype=torch.uint8)
    experts = "model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.gate_up_proj_blocks": codes,
        f"{experts}.gate_up_proj_scales": scales,
        f"{experts}.gate_up_proj_bias": torch.rand(3, 6, dtype=torch.bfloat16),
    }
    result = converted(tmp_path, tensors, {"quant_method": "mxfp4"})
    assert result.keys() == {f"{experts}.gate_up_proj", f"{experts}.gate_up_proj_bias"}
    expected = convert_moe_packed_tensors(codes, scales)
    assert torch.equal(result[f"{experts}.gate_up_proj"], expected)
    assert expected.shape == (3, 64, 6)


@pytest.mark.parametrize(("rows", "columns", "group"), [(16, 64, 32), (5, 44, 11)])
def test_packed_int4_as_compressed_tensors_packs_it(
    tmp_path: Path, rows: int, columns: int, group: int
) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    scales = torch.rand(rows, columns // group, dtype=torch.bfloat16)
    tensors = {
        f"{NAME}.weight_packed": pack_to_int32(codes, 4),
        f"{NAME}.weight_scale": scales,
        f"{NAME}.weight_shape": torch.tensor([rows, columns]),
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": group}}},
    }
    result = converted(tmp_path, tensors, settings)
    expected = codes.float() * scales.float().repeat_interleave(group, 1)
    assert result.keys() == {f"{NAME}.weight"}
    assert torch.equal(result[f"{NAME}.weight"], expected.bfloat16())


def test_fp8_with_a_scale_for_each_row(tmp_path: Path) -> None:
    codes = torch.randn(4, 8).to(torch.float8_e4m3fn)
    scale = torch.rand(4, 1)
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
    }
    tensors = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": scale}
    result = converted(tmp_path, tensors, settings)
    assert torch.equal(result[f"{NAME}.weight"], (codes.float() * scale).bfloat16())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "has no quantization_config: its weights are not quantized"),
        ({"quant_method": "gptq"}, "quant_method 'gptq': expected fp8 with weight_block_size"),
        ({"quant_method": "fp8"}, "expected fp8 with weight_block_size"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 8}}},
            },
            "format 'pack-quantized' with",
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused(tmp_path: Path, settings: Any, message: str) -> None:
    source = write(tmp_path / "quantized", {"a": torch.ones(1)}, settings)
    with pytest.raises(ConfigurationError, match=message):
        dequantize(source, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_several_files_are_written_one_at_a_time(tmp_path: Path) -> None:
    tensors = {}
    for layer in range(4):
        tensors[f"model.layers.{layer}.q.weight"] = torch.ones(8, 8).to(torch.float8_e4m3fn)
        tensors[f"model.layers.{layer}.q.weight_scale_inv"] = torch.full((1, 1), float(layer))
    source = write(tmp_path / "quantized", tensors, FP8)
    dequantize(source, tmp_path / "plain", shard_bytes=200)
    index = json.loads((tmp_path / "plain/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    for name, file in index["weight_map"].items():
        tensor = load_file(tmp_path / "plain" / file)[name]
        assert float(tensor.float().mean()) == float(name.split(".")[2])


def test_the_command_says_where_the_checkpoint_is_and_refuses_a_full_directory(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "quantized", {"a.weight": torch.ones(1)}, FP8)
    command = [sys.executable, "-m", "sluice_trainer.convert", "dequantize"]
    command += [str(source), str(tmp_path / "plain")]
    first, second = (subprocess.run(command, capture_output=True, text=True) for _ in range(2))
    assert (first.returncode, first.stdout.strip()) == (0, str(tmp_path / "plain"))
    assert (second.returncode, second.stderr.strip()) == (
        2,
        f"error: {tmp_path / 'plain'} is not empty; expected a new directory",
    )
