"""Which parts of a checkpoint are trained, by its config.json and the names of its tensors."""

from __future__ import annotations

import json
import runpy
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.sglang.plugin.__main__ import PATH as SGLANG
from sluice.engines.vllm.plugin.__main__ import PATH as VLLM
from sluice.model_parts import kept_parts, kept_parts_of

TEXT = {"num_hidden_layers": 2}
PICTURES = {"text_config": TEXT, "vision_config": {}}


@pytest.mark.parametrize(
    ("config", "names", "parts"),
    [
        pytest.param(
            TEXT,
            ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"],
            {},
            id="a language model",
        ),
        pytest.param({"n_layer": 2}, ["transformer.h.7.ln_1.weight"], {}, id="other names"),
        pytest.param(
            TEXT,
            ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight"],
            {"model.layers.2": 2},
            id="DeepSeek's and GLM's further tokens",
        ),
        pytest.param(
            TEXT, ["model.norm.weight", "mtp.fc.weight"], {"mtp": 1}, id="Qwen's further tokens"
        ),
        pytest.param(
            TEXT | {"vision_config": {}},
            ["model.layers.0.mlp.up_proj.weight", "visual.merger.mlp.0.weight", "lm_head.weight"],
            {"visual": 1},
            id="Qwen2.5-VL, whose configuration has no text_config",
        ),
        pytest.param(
            PICTURES,
            [
                "model.language_model.layers.0.mlp.up_proj.weight",
                "model.language_model.norm.weight",
                "model.visual.patch_embed.proj.weight",
                "model.visual.merger.norm.weight",
                "mtp.layers.0.mlp.up_proj.weight",
                "lm_head.weight",
            ],
            {"model.visual": 2, "mtp": 1},
            id="Qwen3.5",
        ),
        pytest.param(
            PICTURES,
            [
                "language_model.model.layers.0.mlp.up_proj.weight",
                "language_model.lm_head.weight",
                "vision_tower.vision_model.encoder.layers.7.layer_norm1.weight",
                "multi_modal_projector.mm_input_projection_weight",
            ],
            {"vision_tower": 1, "multi_modal_projector": 1},
            id="Gemma 3",
        ),
    ],
)
def test_parts_are_told_by_names(
    config: dict[str, Any], names: list[str], parts: dict[str, int]
) -> None:
    assert kept_parts(config, names) == parts


def write(directory: Path, names: list[str], *, index: bool) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(PICTURES))
    if index:
        text = json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")})
        (directory / "model.safetensors.index.json").write_text(text)
    else:
        entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        header = json.dumps({"__metadata__": {}, **dict.fromkeys(names, entry)}).encode()
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return directory


@pytest.mark.parametrize("index", [True, False])
def test_names_are_read_from_an_index_or_a_file(tmp_path: Path, index: bool) -> None:
    model = write(tmp_path / "model", ["model.visual.a", "lm_head.weight"], index=index)
    assert kept_parts_of(model) == {"model.visual": 1}
    assert kept_parts_of(tmp_path) == {}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1", id="a pointer of Git LFS"),
        pytest.param(struct.pack("<Q", 100) + b'{"a": {', id="cut off"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    expected = rf"model.safetensors is damaged or no safetensors file \({len(content)} bytes\)"
    with pytest.raises(ValueError, match=expected):
        kept_parts_of(tmp_path)


@pytest.fixture(params=[(SGLANG, "--model-path"), (VLLM, "--model")], ids=["sglang", "vllm"])
def added(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """The arguments that a launch script adds to these."""
    path, model_argument = request.param
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = runpy.run_path(str(path / "launch_server.py"))

    def arguments(model: Path, *words: str) -> list[str]:
        result: list[str] = script["load_arguments"]([model_argument, str(model), *words])
        return result

    return arguments


def test_an_engine_reads_the_parts_that_the_trainer_does_not_send(
    tmp_path: Path, added: Callable[..., list[str]]
) -> None:
    text = write(tmp_path / "text", ["model.language_model.norm.weight"], index=True)
    pictures = write(tmp_path / "pictures", ["model.visual.a"], index=True)
    assert added(pictures, "--load-format", "dummy") == ["--load-format", "auto"]
    assert added(text, "--load-format", "dummy") == []
    assert added(pictures, "--load-format", "runai_streamer") == []
    assert added(Path("Qwen/Qwen3-0.6B"), "--load-format", "dummy") == []


@pytest.mark.parametrize(
    ("trained", "parts"),
    [
        (set(), {"model.visual": 3, "mtp": 1}),
        ({"projector"}, {"model.visual": 1, "mtp": 1}),
        ({"vision", "projector"}, {"mtp": 1}),
    ],
    ids=["none", "projector", "both"],
)
def test_trained_parts_of_the_vision_side_are_not_kept(
    tmp_path: Path, trained: set[str], parts: dict[str, int]
) -> None:
    names = [
        "model.language_model.norm.weight",
        "model.visual.blocks.0.norm1.weight",
        "model.visual.merger.norm.weight",
        "model.visual.deepstack_merger_list.0.norm.weight",
        "mtp.fc.weight",
    ]
    (tmp_path / "config.json").write_text(json.dumps(PICTURES))
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert kept_parts_of(tmp_path, trained) == parts
