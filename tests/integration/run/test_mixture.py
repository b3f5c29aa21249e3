"""A mixture of experts: trained by ranks that share the experts, served by the real engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.telemetry import rollouts
from tests.integration.run.laptop import Laptop, values

pytestmark = pytest.mark.timeout(600)
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def mixture(example: Path, directory: Path) -> Path:
    model = directory / "mixture"
    shutil.copytree(example / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | MIXTURE))
    return model


@pytest.mark.parametrize(
    "spread",
    [
        pytest.param("trainer.parallelism={expert: 2}", id="whole experts"),
        pytest.param("trainer.backend=fsdp", id="fsdp"),
    ],
)
@pytest.mark.long
def test_experts_of_two_trainer_ranks_reach_the_engine_in_stacks(
    laptop: Callable[..., Laptop], example: Path, tmp_path: Path, spread: str
) -> None:
    run = laptop(
        f"model.path={mixture(example, tmp_path)}",
        "trainer.processesPerNode=2",
        spread,
        "trainer.steps=3",
        "rollout.batchSize=8",
        "weightSync.bucketMiB=1",
        "weightSync.timeoutSeconds=60",
    )
    assert run.run(500) == 0, run.text()[-3000:]
    assert run.summary()["steps"] == 3
    [log] = (run.directory / "logs").glob("*.engine.log")
    assert "stacked experts are copied at once" in log.read_text()
    records = list(run.steps().values())
    assert max(values(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4


@pytest.mark.long
def test_experts_that_the_engine_chose_reach_the_trainer(
    laptop: Callable[..., Laptop], example: Path, tmp_path: Path
) -> None:
    run = laptop(
        f"model.path={mixture(example, tmp_path)}",
        "trainer.routingReplay=rollout",
        "trainer.steps=2",
        "rollout.batchSize=8",
        "debug.dumpRollouts=true",
    )
    assert run.run(500) == 0, run.text()[-3000:]
    records = list(run.steps().values())
    assert max(values(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    groups = rollouts.read(rollouts.path_of(run.directory / "rollouts", 2))
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(sample.tokens) - 1
        assert sample.routed_experts.max() < MIXTURE["num_experts"]
