"""FSDP2 ranks that share the tokens of a row compute what one rank does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sluice_trainer.fsdp.families import can_pack
from sluice_trainer.fsdp.loading import Recipe
from sluice_trainer.fsdp.row_share import check_shareable
from sluice_trainer.model.unsupported import UnsupportedModelError
from tests.integration.trainer import estimate_steps, tiny
from tests.integration.trainer.test_estimators import ALGORITHMS
from tests.integration.trainer.test_fsdp_steps import TRAINER, apart

pytestmark = pytest.mark.usefixtures("process_group")

LORA = {"lora": {"rank": 4}, "recompute": "full"}
# Family, algorithm and fields of the trainer. Two key heads are repeated for four ranks.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grpo": ("qwen3-tied", "grpo", {}),
    "a ratio per sequence": ("qwen3", "gspo", {}),
    "critic": ("qwen2", "ppo", {}),
    "adapter and recomputation": ("qwen3", "grpo", LORA),
    "yarn": ("qwen3-yarn", "grpo", {}),
    "experts": ("qwen3-moe", "grpo", {}),
    "latent attention": ("deepseek-v3", "grpo", {}),
    "a window": ("mistral", "grpo", {}),
    # A row of each micro-batch, in which some ranks have no token that predicts a response.
    "a sequence per row": ("qwen3", "grpo", {"maxTokensPerGpu": 1}),
}

ON_FOUR = ("grpo", "a sequence per row")


def directory(family: str, models: dict[str, Path], root: Path) -> Path:
    if family in tiny.OTHERS:
        return tiny.save_kind(*tiny.OTHERS[family], root / family)
    return models[family]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_steps_do_not_depend_on_the_ranks_that_share_a_row(
    models: dict[str, Path], tmp_path: Path, world: int
) -> None:
    """Two ranks share rows; of four ranks, two pairs share rows, and then all four do."""
    jobs: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    for name in CASES if world == 2 else ON_FOUR:
        family, algorithm, more = CASES[name]
        job: dict[str, Any] = {
            "model": str(directory(family, models, tmp_path)),
            "algorithm": ALGORITHMS[algorithm],
            "steps": 2,
        }
        job |= {"trainer": {**TRAINER, **more, "backend": "fsdp"}}
        for context in (2,) if world == 2 else (2, 4):
            shared = {**job["trainer"], "nodes": world, "parallelism": {"context": context}}
            dump = str(tmp_path / f"{name} {context}")
            jobs.append((name, job, {**job, "trainer": shared, "dump": dump}))
    results, *others = tiny.run(
        "estimate_steps.py", json.dumps([shared for _, _, shared in jobs]), world=world
    )
    assert all(result == results for result in others)
    for (name, job, shared), result in zip(jobs, results, strict=True):
        expected = estimate_steps.train(**job, dump=str(tmp_path / "alone"))
        after = safetensors.torch.load_file(tmp_path / "alone")
        before = safetensors.torch.load_file(Path(job["model"]) / "model.safetensors")
        assert apart(after, {key: before[key] for key in after}) > 1e-4, name
        assert apart(safetensors.torch.load_file(shared["dump"]), after) < 2e-6, name
        for ours, theirs in zip(result["history"], expected["history"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("family", "ranks", "problem"),
    [
        ("qwen3", 3, "the model has 4 heads and 2 of keys, which they cannot share"),
        ("qwen3-next", 2, "model_type 'qwen3_next' has layers that need whole sequences"),
    ],
)
def test_ranks_do_not_share_what_they_cannot_compute(
    models: dict[str, Path], tmp_path: Path, family: str, ranks: int, problem: str
) -> None:
    model = tiny.hf_model(directory(family, models, tmp_path), "eager")
    with pytest.raises(UnsupportedModelError, match=problem) as caught:
        check_shareable(model, ranks, packs=can_pack(model))
    assert "leave it out, or choose backend: megatron" in str(caught.value)


def test_attention_that_is_more_than_a_softmax_is_refused(tmp_path: Path) -> None:
    model = directory("gpt-oss", {}, tmp_path)
    recipe = Recipe(model, drawn=False, seed=0, compute=torch.float32, shares_rows=True)
    with pytest.raises(UnsupportedModelError, match="cannot share the attention of model_type"):
        recipe.config()
