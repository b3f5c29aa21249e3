"""Adapters in Megatron's layers learn the same in every layout, and as PEFT's and FSDP2's."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sluice_trainer.lora.merging import merge_adapter
from tests.cases import slow
from tests.integration.models.checkpoints import MODEL_TYPES
from tests.integration.trainer import estimate_steps, plain, tiny
from tests.integration.trainer.lora_jobs import JOBS, KL, LORA, make, options
from tests.integration.trainer.test_fsdp_checkpoints import close
from tests.integration.trainer.test_fsdp_steps import apart
from tests.integration.trainer.test_teacher import checkpoint

pytestmark = pytest.mark.usefixtures("process_group")

Trained = tuple[dict[str, Any], Path]
TWO: dict[str, dict[str, int]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "data": {},
}


def job(name: str, model: Path, layout: dict[str, int], **changes: Any) -> dict[str, Any]:
    """Return the arguments of a job's training in a layout."""
    request = options(name, model, backend="megatron", **changes)
    request["trainer"] = {**request["trainer"], "parallelism": layout, "processesPerNode": 2}
    return request


def train(jobs: list[dict[str, Any]], world: int = 2) -> list[dict[str, Any]]:
    """Train on several ranks, whose results must be equal."""
    first, *others = tiny.run("estimate_steps.py", json.dumps(jobs), world=world)
    assert all(other == first for other in others)
    results: list[dict[str, Any]] = first
    return results


@pytest.fixture(scope="module")
def in_layout(
    qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Trained]:
    """Train five steps of a job in a layout; return its results and the file of its weights."""
    root = tmp_path_factory.mktemp("layouts")

    @cache
    def train_all(layout: str) -> dict[str, Trained]:
        files = {name: root / f"{layout}-{number}" for number, name in enumerate(JOBS)}
        jobs = [job(name, qwen3, TWO[layout], dump=str(file)) for name, file in files.items()]
        results = zip(JOBS, train(jobs), strict=True)
        return {name: (result, files[name]) for name, result in results}

    return lambda name, layout: train_all(layout)[name]


@pytest.fixture(scope="module")
def with_peft(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Train five steps of a job with PEFT and AdamW."""
    root = tmp_path_factory.mktemp("peft")

    @cache
    def train_once(name: str) -> Trained:
        file = root / str(list(JOBS).index(name))
        request = options(name, qwen3, dump=str(file))
        return estimate_steps.train(**request, backend=plain.Plain), file

    return train_once


# A pipeline learns the same below, from checkpoints and in families.
@pytest.mark.parametrize("layout", slow(TWO, "pipeline"))
@pytest.mark.parametrize("name", JOBS)
def test_five_steps_on_two_ranks_equal_peft_with_adamw(
    qwen3: Path,
    in_layout: Callable[[str, str], Trained],
    with_peft: Callable[[str], Trained],
    name: str,
    layout: str,
) -> None:
    expected, reference = with_peft(name)
    result, file = in_layout(name, layout)
    before, after = load_file(qwen3 / "model.safetensors"), load_file(reference)
    assert apart(after, before) > 1e-3
    assert apart(load_file(file), after) < 1e-6
    for ours, theirs in zip(result["history"], expected["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=5e-6)


FAMILIES: dict[str, tuple[str, dict[str, int], dict[str, Any], int]] = {
    "context": ("qwen3-tied", {"context": 2}, {}, 2),
    "virtual pipeline": ("qwen3-tied", {"pipeline": 2, "virtualPipeline": 2}, {}, 2),
    "tensor, recomputed": ("qwen3-tied", {"tensor": 2}, {"recompute": "full"}, 2),
    "tensor x pipeline": ("qwen3-tied", {"tensor": 2, "pipeline": 2}, {}, 4),
    "biases": ("qwen2", {"tensor": 2}, {}, 2),
    "gate and up in one": ("glm4", {"tensor": 2}, {}, 2),
    "experts": ("qwen3-moe", {"expert": 2, "tensor": 2}, {}, 2),
    "experts and dense layers": ("glm4-moe", {"expert": 2, "tensor": 2}, {}, 2),
    "latent": ("deepseek-v3", {"expert": 2, "tensor": 2}, {}, 2),
    "latent, queries direct": ("moonlight", {"tensor": 2}, {}, 2),
}


# Cases whose parts are in others.
SLOW = (
    "tensor, recomputed",
    "tensor x pipeline",
    "experts and dense layers",
    "latent, queries direct",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[
                pytest.mark.support("megatron", "lora", MODEL_TYPES[family]),
                *([pytest.mark.long] if case in SLOW else []),
            ],
        )
        for case, (family, *_) in FAMILIES.items()
    ],
)
def test_families_and_layouts_equal_fsdp2(
    models: dict[str, Path], tmp_path: Path, case: str
) -> None:
    family, layout, trainer, world = FAMILIES[case]
    alone = options("grpo with a KL loss", models[family], dump=str(tmp_path / "fsdp"))
    expected = estimate_steps.train(**alone)
    request = job("grpo with a KL loss", models[family], layout, dump=str(tmp_path / "megatron"))
    request["trainer"] |= {"processesPerNode": world, **trainer}
    (result,) = train([request], world)
    before = load_file(models[family] / "model.safetensors")
    ours, theirs = load_file(tmp_path / "megatron"), load_file(tmp_path / "fsdp")
    assert apart(theirs, before) > 1e-3
    # Of a mixture, the order of sums over experts differs.
    assert apart(ours, theirs) < (1e-5 if family in tiny.REORDERED else 1e-6)
    close(result["history"], expected["history"])


@pytest.mark.parametrize(
    "name", slow(("grpo with a KL loss", "ppo", "pissa with a KL loss"), "grpo with a KL loss")
)
def test_any_layout_and_backend_resumes_a_checkpoint(
    qwen3: Path, tmp_path: Path, name: str
) -> None:
    """Two tensor-parallel ranks, then FSDP2 alone, then two pipeline stages: as without a stop."""
    saved = tmp_path / "checkpoints"
    through = options(name, qwen3, dump=str(tmp_path / "through"))
    expected = estimate_steps.train(**through)["history"]
    (first,) = train([job(name, qwen3, {"tensor": 2}, steps=2, save_at=2, checkpoints=str(saved))])
    assert {path.suffix for path in saved.rglob("iter_*/*.*")} <= {".json", ".safetensors"}
    second = estimate_steps.train(
        **options(name, qwen3, steps=4, save_at=4, checkpoints=str(saved))
    )
    last = job(name, qwen3, {"pipeline": 2}, checkpoints=str(saved), dump=str(tmp_path / "last"))
    (third,) = train([last])
    assert [first["resumed"], second["resumed"], third["resumed"]] == [None, 2, 4]
    close(first["history"] + second["history"] + third["history"], expected)
    assert apart(load_file(tmp_path / "last"), load_file(tmp_path / "through")) < 1e-6


def test_merged_weights_are_those_of_the_base_and_the_adapter(qwen3: Path, tmp_path: Path) -> None:
    request = job(
        "sft",
        qwen3,
        {"tensor": 2},
        steps=2,
        save_at=2,
        checkpoints=str(tmp_path),
        dump=str(tmp_path / "sent"),
    )
    train([request])
    merge_adapter(tmp_path / "iter_0000002", qwen3, tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert apart(load_file(tmp_path / "sent"), merged) < 1e-7
    assert apart(merged, load_file(qwen3 / "model.safetensors")) > 1e-3


def test_in_bf16_an_adapter_learns_in_float32(qwen3: Path, tmp_path: Path) -> None:
    request = job(
        "ppo", qwen3, {"tensor": 2}, steps=2, save_at=2, checkpoints=str(tmp_path / "bf16")
    )
    request["trainer"]["precision"] = "bf16"
    (ours,) = train([request])
    for part in (".", "critic"):
        adapter = load_file(tmp_path / "bf16/iter_0000002" / part / "adapter_model.safetensors")
        for tensor in adapter.values():
            assert tensor.bfloat16().float().ne(tensor).any()
    exact = estimate_steps.train(**options("ppo", qwen3, steps=2))
    for half, full in zip(ours["history"], exact["history"], strict=True):
        assert half["train/grad_norm"] == pytest.approx(full["train/grad_norm"], rel=0.05)


def test_ranks_with_dropout_stay_equal(qwen3: Path) -> None:
    request = job("sft", qwen3, {"tensor": 2}, steps=2)
    dropping = {**request, "trainer": {**request["trainer"], "lora": {**LORA, "dropout": 0.5}}}
    without, with_dropout = train([request, dropping])
    assert with_dropout["history"] != without["history"]


def test_the_reference_of_a_replayed_mixture_chooses_its_own_experts(
    models: dict[str, Path],
) -> None:
    trainer = {"lora": LORA, "routingReplay": "rollout"}
    replaying = make(models["qwen3-moe"], "megatron", trainer=trainer, algorithm=KL)
    shard = tiny.batch(6, seed=1)
    replayed = tiny.with_experts(shard, models["qwen3-moe"])
    reference, own = replaying.reference_log_probs(replayed), replaying.log_probs(shard)
    assert reference is not None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(reference, own, strict=True))
    forced = zip(replaying.log_probs(replayed), own, strict=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in forced)


def test_distillation_into_an_adapter_equals_fsdp2(models: dict[str, Path], tmp_path: Path) -> None:
    student = checkpoint(models["qwen3"], tmp_path / "student")
    teacher = checkpoint(models["qwen3-tied"], tmp_path / "teacher")
    distillation = {"teacher": {"path": str(teacher)}, "divergence": "forward_kl"}
    algorithm = {"estimator": "rloo", "distillation": distillation}
    request = job("sft", student, {"tensor": 2}, steps=2) | {"algorithm": algorithm}
    (spread,) = train([request])
    alone = estimate_steps.train(**options("sft", student, steps=2) | {"algorithm": algorithm})
    close(spread["history"], alone["history"])
    assert spread["history"][0]["train/opd_loss"] > 1e-3
