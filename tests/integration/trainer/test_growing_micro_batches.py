"""Micro-batches that grow between steps give the same results, on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.trainer import tiny
from tests.integration.trainer.train_steps import train

STEPS = 5
SIZE = "perf/micro_batch_tokens"
JOB: dict[str, Any] = {
    "steps": STEPS,
    "algorithm": {"kl": {"lossCoef": 0.05, "type": "k3"}, "entropyCoef": 0.01},
}

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def alone(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, float]], Path]:
    """Return metrics and weights of one rank with micro-batches of 64 tokens."""
    dump = tmp_path_factory.mktemp("alone") / "weights"
    trainer = {"maxTokensPerGpu": 64}
    result = train(str(models["qwen3-tied"]), **JOB, trainer=trainer, dump=str(dump))
    return result["history"], dump


@pytest.mark.parametrize(
    ("trainer", "first_tokens", "full_after", "sizes"),
    [
        pytest.param({}, 40, [9, 9], [40, 40, 80, 160, 320], id="megatron"),
        pytest.param({}, 40, [9, 1], [40, 40, 80, 80, 80], id="megatron, one rank full"),
        pytest.param(
            {"backend": "fsdp"},
            *(40, [9, 9], [40, 40, 80, 160, 320]),
            id="fsdp",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"backend": "fsdp"}, 40, [1, 9], [40, 40, 80, 80, 80], id="fsdp, one rank full"
        ),
        pytest.param(
            {"parallelism": {"tensor": 2}},
            *(40, [9, 1], [40, 40, 80, 80, 80]),
            id="tensor",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"parallelism": {"context": 2}}, 20, [9, 1], [20, 20, 40, 40, 40], id="context"
        ),
        pytest.param(
            {"parallelism": {"pipeline": 2}}, 8, [9, 9], [8, 8, 16, 16, 16], id="pipeline"
        ),
    ],
)
def test_two_ranks_grow_alike_and_train_the_same(
    models: dict[str, Path],
    alone: tuple[list[dict[str, float]], Path],
    tmp_path: Path,
    trainer: dict[str, Any],
    first_tokens: int,
    full_after: list[int],
    sizes: list[int],
) -> None:
    job = {
        **JOB,
        "model": str(models["qwen3-tied"]),
        "trainer": {**trainer, "gpusPerNode": 2, "precision": "fp32", "maxTokensPerGpu": None},
        "dump": str(tmp_path / "weights"),
        "first_tokens": first_tokens,
        "full_after": full_after,
    }
    first, second = tiny.run("train_steps.py", json.dumps(job), world=2)
    assert first["history"] == second["history"]
    assert first["weights"] == second["weights"]
    assert [step.pop(SIZE) for step in first["history"]] == sizes
    history, dump = alone
    for ours, theirs in zip(first["history"], history, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-6)
    weights, expected = load_file(tmp_path / "weights"), load_file(dump)
    assert max((weights[name] - expected[name]).abs().max().item() for name in expected) < 5e-5
