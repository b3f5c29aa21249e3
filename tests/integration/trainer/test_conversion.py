"""`sluice convert` brings weights from Hugging Face's format to Megatron's and back unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from sluice_trainer.checkpoint import checkpoint_directory
from sluice_trainer.megatron.checkpoints.conversion import dist_to_hf, hf_to_dist
from sluice_trainer.model.huggingface_files import ConversionError
from tests.integration.trainer import tiny

pytestmark = pytest.mark.usefixtures("process_group")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in safetensors.torch.load_file(file).items()
    }


def same(first: Path, second: Path) -> bool:
    ours, theirs = weights(first), weights(second)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype
        for name in ours
    )


@pytest.mark.parametrize(
    "family", ["qwen3-tied", "qwen2", "glm4", "qwen3-moe-mixed", "deepseek-v3"]
)
def test_a_round_trip_does_not_change_the_weights(
    models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    written = hf_to_dist(models[family], tmp_path / "dist")
    assert written.name == "iter_0000000"
    dist_to_hf(tmp_path / "dist", models[family], tmp_path / "hf", shard_bytes=100_000)
    assert same(models[family], tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2


def test_bf16_weights_keep_router_biases_in_fp32(models: dict[str, Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models["deepseek-v3"], dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "bf16")
    assert {str(t.dtype) for t in weights(tmp_path / "bf16").values()} == {
        "torch.bfloat16",
        "torch.float32",
    }
    hf_to_dist(tmp_path / "bf16", tmp_path / "dist")
    dist_to_hf(tmp_path / "dist", tmp_path / "bf16", tmp_path / "hf")
    assert same(tmp_path / "bf16", tmp_path / "hf")


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3-tied", {"tensor": 2}), ("deepseek-v3", {"expert": 2, "tensor": 2})],
)
def test_a_checkpoint_trained_on_two_ranks_is_converted(
    models: dict[str, Path], tmp_path: Path, family: str, layout: dict[str, int]
) -> None:
    job = {
        "model": str(models[family]),
        "steps": 1,
        "save_at": 1,
        "algorithm": {},
        "trainer": {"parallelism": layout, "processesPerNode": 2},
        "checkpoints": str(tmp_path / "dist"),
        "dump": str(tmp_path / "dump.safetensors"),
    }
    tiny.run("train_steps.py", json.dumps(job), world=2)
    dist_to_hf(checkpoint_directory.path_of(tmp_path / "dist", 1), models[family], tmp_path / "hf")
    trained = safetensors.torch.load_file(tmp_path / "dump.safetensors")
    converted = weights(tmp_path / "hf")
    assert trained.keys() == converted.keys()
    assert all(torch.equal(trained[name], converted[name]) for name in trained)


def test_a_directory_without_a_checkpoint_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConversionError, match="neither is nor holds a torch_dist checkpoint"):
        dist_to_hf(tmp_path, models["qwen3"], tmp_path / "hf")
    hf_to_dist(models["qwen3"], tmp_path / "dist")
    with pytest.raises(ConversionError, match="exists already"):
        hf_to_dist(models["qwen3"], tmp_path / "dist")
    with pytest.raises(
        ConversionError,
        match=r"does not hold the model .*config\.json describes: there is no tensor",
    ):
        dist_to_hf(tmp_path / "dist", models["qwen3-moe"], tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def sluice(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sluice_cli", "convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_line_converts_in_both_directions(
    models: dict[str, Path], tmp_path: Path
) -> None:
    there = sluice("hf-to-dist", models["qwen2"], tmp_path / "dist")
    assert (there.returncode, there.stderr) == (0, "")
    back = sluice("dist-to-hf", tmp_path / "dist", tmp_path / "hf", "--like", models["qwen2"])
    assert (back.returncode, back.stderr) == (0, "")
    assert same(models["qwen2"], tmp_path / "hf")
    again = sluice("hf-to-dist", models["qwen2"], tmp_path / "dist")
    assert again.returncode == 2
    assert again.stderr.startswith("error: ")
