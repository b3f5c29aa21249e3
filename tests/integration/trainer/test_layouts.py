"""Several ranks give the same result as one rank, however work and model are divided."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cases import slow
from tests.integration.trainer import tiny
from tests.integration.trainer.train_steps import train

STEPS = 5
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": {"lossCoef": 0.05, "type": "k3"}, "entropyCoef": 0.01},
    "sequence ratios": {"offPolicy": {"method": "tis", "high": 1.5}, "aggregation": "token_mean"},
}
Run = tuple[dict[str, Any], Path]

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run a job on one rank, once; return its results and the file of its weights."""
    done: dict[str, Run] = {}

    def run(family: str, **job: Any) -> Run:
        key = json.dumps([family, job], sort_keys=True)
        if key not in done:
            dump = tmp_path_factory.mktemp("alone") / "weights.safetensors"
            done[key] = train(str(models[family]), **job, dump=str(dump)), dump
        return done[key]

    return run


def compare(
    model: Path, expected: Run, dump: Path, job: dict[str, Any], layout: dict[str, Any], world: int
) -> None:
    """Train on `world` ranks; losses, gradient norms and weights must equal those of one rank."""
    options = {**job.get("trainer", {}), "parallelism": layout, "processesPerNode": world}
    request = {**job, "model": str(model), "trainer": options, "dump": str(dump)}
    results = tiny.run("train_steps.py", json.dumps(request), world=world)
    assert all(result["history"] == results[0]["history"] for result in results)
    assert all(result["weights"] == results[0]["weights"] for result in results)
    for ours, theirs in zip(results[0]["history"], expected[0]["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-6)
    weights, reference = load_file(dump), load_file(expected[1])
    assert weights.keys() == reference.keys()
    # A step moves a weight by up to 1e-3, or by a part of that if its gradient is mostly rounding
    # error.
    assert max((weights[name] - reference[name]).abs().max().item() for name in weights) < 5e-5


DATA = {
    "uneven shares": (20, {"maxTokensPerGpu": 64}),
    "a rank without sequences, two optimizer steps": (0, {"stepsPerBatch": 2}),
}


@pytest.mark.parametrize("case", DATA)
def test_two_ranks_share_the_sequences(
    models: dict[str, Path], alone: Any, tmp_path: Path, case: str
) -> None:
    share, trainer = DATA[case]
    job = {"steps": STEPS, "algorithm": ALGORITHMS["grpo"], "trainer": trainer}
    compare(models["qwen3"], alone("qwen3", **job), tmp_path / "w", {**job, "share": share}, {}, 2)


# Tied embeddings, four layers, and a vocabulary (131) that two ranks cannot share evenly.
TWO: dict[str, dict[str, int]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "virtual pipeline": {"pipeline": 2, "virtualPipeline": 2},
    "three layers and one": {"pipeline": 2, "firstStageLayers": 3},
    "one layer and three": {"pipeline": 2, "lastStageLayers": 3},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_share_the_model(
    models: dict[str, Path], alone: Any, tmp_path: Path, layout: str, algorithm: str
) -> None:
    job = {"steps": STEPS, "algorithm": ALGORITHMS[algorithm], "trainer": {}}
    compare(models["qwen3-tied"], alone("qwen3-tied", **job), tmp_path / "w", job, TWO[layout], 2)


FOUR: dict[str, dict[str, int]] = {
    "tensor x context": {"tensor": 2, "context": 2},
    "tensor x pipeline": {"tensor": 2, "pipeline": 2},
    "context x virtual pipeline": {"context": 2, "pipeline": 2, "virtualPipeline": 2},
    "context x data": {"context": 2},
    "context of four": {"context": 4},
    "pipeline of four": {"pipeline": 4},
}


@pytest.mark.parametrize("layout", slow(FOUR, "tensor x context", "context of four"))
def test_four_ranks_share_the_model(
    models: dict[str, Path], alone: Any, tmp_path: Path, layout: str
) -> None:
    job = {"steps": STEPS, "algorithm": ALGORITHMS["grpo"], "trainer": {}}
    compare(models["qwen3-tied"], alone("qwen3-tied", **job), tmp_path / "w", job, FOUR[layout], 4)


EXPERTS: dict[str, tuple[str, dict[str, int], int]] = {
    "expert": ("qwen3-moe", {"expert": 2}, 2),
    "expert x tensor": ("qwen3-moe", {"expert": 2, "tensor": 2}, 2),
    "expert x context": ("qwen3-moe", {"expert": 2, "context": 2}, 2),
    "tensor, experts whole": ("qwen3-moe", {"tensor": 2}, 2),
    "expert x tensor x data": ("qwen3-moe", {"expert": 2, "tensor": 2}, 4),
    "expert of four x tensor": ("qwen3-moe", {"expert": 4, "tensor": 2}, 4),
    "expert x pipeline": ("qwen3-moe-mixed", {"expert": 2, "pipeline": 2}, 4),
    "bias and groups": ("deepseek-v3", {"expert": 2, "tensor": 2}, 2),
    "latent x context": ("deepseek-v3", {"context": 2}, 2),
    "latent, queries direct": ("moonlight", {"tensor": 2}, 2),
    "partial rotation": ("glm4-moe", {"expert": 2, "tensor": 2}, 2),
    "sandwich x tensor": ("glm4", {"tensor": 2}, 2),
    "sandwich x context": ("glm4", {"context": 2}, 2),
    "biases": ("qwen2", {"tensor": 2}, 2),
}
# Layouts and families that are part of other cases, or of those of `TWO`.
PARTS_OF_OTHERS = (
    "expert",
    "tensor, experts whole",
    "expert x tensor x data",
    "latent, queries direct",
    "sandwich x tensor",
    "biases",
)


@pytest.mark.parametrize("case", slow(EXPERTS, *PARTS_OF_OTHERS))
def test_families_give_the_same_in_all_layouts(
    models: dict[str, Path], alone: Any, tmp_path: Path, case: str
) -> None:
    family, layout, world = EXPERTS[case]
    job = {"steps": STEPS, "algorithm": ALGORITHMS["grpo"], "trainer": {}}
    compare(models[family], alone(family, **job), tmp_path / "w", job, layout, world)
