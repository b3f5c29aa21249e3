"""Engines with quantized weights compute with what the trainer has sent, update after update.

The judge is transformers, with weights that were quantized and dequantized by the published
schemes. On a CPU SGLang does not quantize activations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.api.groups.rollout import Precision
from sluice.engines.plugin_common.precision import VARIABLE, is_quantized
from sluice_trainer.model.dequantize import dequantize
from sluice_trainer.model.quantize import quantized
from sluice_trainer.weights.disk import Disk, VersionDirectories
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import gpus, save_model
from tests.integration.weights.tools import on_device, publish, serves, serving

MakeSender = Callable[..., WeightSender]
JoinEngine = Callable[..., Any]
DENSE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
MIXTURE = {
    **DENSE,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {"Qwen3": DENSE, "Qwen3Moe": MIXTURE}
pytestmark = pytest.mark.skipif(gpus() > 0, reason="on a GPU activations are quantized too")


def dequantized(tensors: dict[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Return what the codes stand for, by the formulas of the releases, in float32."""
    result = {}
    for name, tensor in tensors.items():
        if "weight_scale" in name:
            continue
        module = name.removesuffix(".weight")
        if not is_quantized(name):
            result[name] = tensor
        elif precision == "fp8_block":
            scales = tensors[f"{module}.weight_scale_inv"]
            whole = torch.kron(scales, torch.ones(128, 128))
            result[name] = tensor.float() * whole[: tensor.shape[0], : tensor.shape[1]]
        else:
            result[name] = tensor.float() * tensors[f"{module}.weight_scale"]
    return result


def judged_by(model: Path, precision: str, directory: Path) -> Path:
    """Write a checkpoint with the weights that a quantized engine has, in float32."""
    directory.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    codes = dict(quantized(on_device(model), precision))
    save_file(dequantized(codes, precision), directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: (
            save_model(root / f"{family}-1", 1, family, **shape),
            save_model(root / f"{family}-2", 2, family, **shape),
        )
        for family, shape in FAMILIES.items()
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "precision", "load_format"),
    [
        ("Qwen3Moe", "fp8_block", "dummy"),
        # The engine reads the checkpoint if the trainer does not send all of it.
        pytest.param("Qwen3", "int8", "auto", marks=pytest.mark.long),
        pytest.param("Qwen3", "fp8", "dummy", marks=pytest.mark.long),
        pytest.param("Qwen3", "fp8_block", "auto", marks=pytest.mark.long),
        pytest.param("Qwen3Moe", "int8", "dummy", marks=pytest.mark.long),
        pytest.param("Qwen3Moe", "fp8", "auto", marks=pytest.mark.long),
    ],
)
async def test_an_engine_computes_with_the_quantized_weights_of_each_update(
    models: dict[str, tuple[Path, Path]],
    family: str,
    precision: Precision,
    load_format: str,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    tmp_path: Path,
) -> None:
    first, second = models[family]
    judges = [
        judged_by(model, precision, tmp_path / str(number))
        for number, model in enumerate((first, second))
    ]
    disk = Disk(
        VersionDirectories(tmp_path / "versions", 1), first, drawn=False, precision=precision
    )
    arguments = ("--load-format", load_format)
    with serving(first, tmp_path / "log", *arguments, **{VARIABLE: precision}) as engine:
        await join_engine("rollout-0", engine.address)
        over_gloo, over_disk = make_sender(), make_sender(disk, attempt=2, transport="disk")
        updates = [(over_gloo, 0), (over_gloo, 1), (over_disk, 0), (over_disk, 1)]
        for version, (sender, weights) in enumerate(updates):
            tensors = list(quantized(on_device((first, second)[weights]), precision))
            update = await publish(sender, version, tensors)
            assert (list(update.engines), update.failed) == (["rollout-0"], {})
            assert await serves(engine.url, judges[weights], version)
        assert not await serves(engine.url, second, version), "quantization is not visible"
    (written,) = (tmp_path / "versions").iterdir()
    dequantize(written, tmp_path / "bf16")  # it reads the form from config.json
    plain, expected = load_all(tmp_path / "bf16"), load_all(judges[1])
    assert plain.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(plain[name].float(), tensor.bfloat16().float()) or not is_quantized(name)


def load_all(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
