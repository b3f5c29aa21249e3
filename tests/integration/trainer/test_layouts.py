"""Two ranks come to what one rank comes to, however the work is divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from train_steps import train

ALGORITHM = {"kl": {"lossCoef": 0.05, "type": "k3"}, "entropyCoef": 0.01}


@pytest.mark.parametrize(
    ("share", "trainer"),
    [(20, {"maxTokensPerGpu": 64}), (0, {"stepsPerBatch": 2})],
    ids=["uneven shares", "a rank without sequences, two optimizer steps"],
)
@pytest.mark.usefixtures("process_group")
def test_two_ranks_equal_one(qwen3: Path, share: int, trainer: dict[str, Any]) -> None:
    job = {"model": str(qwen3), "steps": 3, "algorithm": ALGORITHM}
    alone = train(**job, trainer=trainer)
    first, second = tiny.run("train_steps.py", json.dumps({**job, "share": share, "trainer": trainer}), world=2)
    assert first["history"] == second["history"]
    assert first["weights"] == second["weights"]
    for ours, expected in zip(first["history"], alone["history"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@pytest.mark.usefixtures("process_group")
def test_a_model_spread_over_two_ranks_equals_one(models: dict[str, Path], layout: str) -> None:
    """Tied embeddings, and a vocabulary (131) that two ranks cannot share evenly."""
    job = {"model": str(models["qwen3-tied"]), "steps": 3, "algorithm": ALGORITHM}
    alone = train(**job, trainer={})
    trainer = {"parallelism": {layout: 2}, "processesPerNode": 2}
    first, second = tiny.run("train_steps.py", json.dumps({**job, "trainer": trainer}), world=2)
    assert first["history"] == second["history"]
    assert first["weights"] == second["weights"]
    for ours, expected in zip(first["history"], alone["history"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=2e-6)
