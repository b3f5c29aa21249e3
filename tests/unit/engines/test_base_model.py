"""An engine tells which model it has read."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sluice.engines.sglang.plugin.__main__ import PATH as SGLANG
from sluice.engines.vllm.plugin.__main__ import PATH as VLLM
from sluice.model_digest import model_digest


@pytest.fixture(
    params=[
        pytest.param((SGLANG, "sluice_sglang.startup.base_model"), id="sglang"),
        pytest.param((VLLM, "sluice_vllm.base_model"), id="vllm"),
    ]
)
def plugin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    path, module = request.param
    monkeypatch.syspath_prepend(str(path))
    return import_module(module)


async def asked(plugin: Any, directory: Path) -> dict[str, str]:
    description: dict[str, str] = await plugin.BaseModel(str(directory)).describe()
    return description


async def test_the_digest_is_that_of_the_trainer(plugin: Any, tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / "model.safetensors")
    told = await asked(plugin, tmp_path)
    assert told == {"model": str(tmp_path), "digest": model_digest(tmp_path)}


async def test_a_model_that_cannot_be_read_is_a_problem(plugin: Any, tmp_path: Path) -> None:
    told = await asked(plugin, tmp_path)
    assert told["problem"].startswith(f"{tmp_path} has no weights")
    assert "digest" not in told
