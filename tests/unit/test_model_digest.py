"""The digest by which a trainer and an engine compare the models that they have read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sluice import model_digest as digests
from sluice.model_digest import model_digest
from sluice_trainer.model.huggingface_files import write_index

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.arange(5, dtype=torch.bfloat16),
    "empty": torch.zeros(0),
}


def single(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_files_and_their_order_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = single(tmp_path / "whole", TENSORS)
    divided = tmp_path / "divided"
    divided.mkdir()
    files = {name: f"{name}.safetensors" for name in TENSORS}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, divided / file, metadata={"format": "pt"})
    write_index(divided, files, 0)
    assert model_digest(divided) == model_digest(whole)
    monkeypatch.setattr(digests, "_PIECE", 7)
    assert model_digest(divided) == model_digest(whole), "in several pieces"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({**TENSORS, "a": TENSORS["a"] + 1}, id="values"),
        pytest.param({**TENSORS, "b": TENSORS["b"].reshape(3, 2)}, id="shape"),
        pytest.param({**TENSORS, "a": TENSORS["a"].view(torch.float16)}, id="type"),
        pytest.param({"c" if n == "b" else n: t for n, t in TENSORS.items()}, id="name"),
        pytest.param({n: t for n, t in TENSORS.items() if n != "empty"}, id="number"),
    ],
)
def test_another_model_has_another_digest(other: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert model_digest(single(tmp_path / "1", TENSORS)) != model_digest(
        single(tmp_path / "2", other)
    )


def test_a_large_tensor_that_differs_at_its_end_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_PIECE", 64)
    zeros = torch.zeros(100)
    changed = zeros.clone()
    changed[-1] = 1
    one, two = single(tmp_path / "1", {"a": zeros}), single(tmp_path / "2", {"a": changed})
    assert model_digest(one) != model_digest(two)


def test_a_pickled_checkpoint_is_hashed_as_a_file(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    for directory, content in ((one, b"weights"), (two, b"others")):
        directory.mkdir()
        (directory / "pytorch_model.bin").write_bytes(content)
    assert model_digest(one) != model_digest(two)
    (two / "pytorch_model.bin").write_bytes(b"weights")
    assert model_digest(one) == model_digest(two)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no weights: expected model\.safetensors"):
        model_digest(tmp_path)
    damaged = single(tmp_path / "damaged", TENSORS) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: it ends in"):
        model_digest(damaged.parent)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"z": "damaged/model.safetensors"}}))
    with pytest.raises(ValueError, match="has no tensor z"):
        model_digest(tmp_path)
