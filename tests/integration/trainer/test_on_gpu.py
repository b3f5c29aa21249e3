"""The same numbers on a GPU: NCCL, variable-length attention, no adaptations."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import tiny
import torch

from sluice_trainer.megatron.policy import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("process_group"),
]


def make(model: Path, precision: str, **changes: object) -> Policy:
    spec = tiny.spec(model, trainer={"gpusPerNode": 1, "precision": precision, "maxTokensPerGpu": 150}, **changes)
    return Policy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.15)])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_log_probs_equal_transformers_on_the_cpu(
    models: dict[str, Path], family: str, precision: str, tolerance: float
) -> None:
    shard = tiny.batch(12, seed=1)
    reference = tiny.hf_model(models[family]).requires_grad_(False)
    for sequence, values in zip(shard, make(models[family], precision).log_probs(shard), strict=True):
        assert (values - tiny.hf_log_probs(reference, sequence)[0]).abs().max() < tolerance


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-3), ("bf16", 0.05)])
def test_training_steps_equal_transformers_with_adamw(qwen3: Path, precision: str, tolerance: float) -> None:
    policy, plain = make(qwen3, precision), tiny.hf_model(qwen3)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=tiny.EPS, weight_decay=0.0)
    for step in range(3):
        shard = tiny.batch(8, seed=step)
        metrics = policy.train([shard], [tiny.totals(shard)])
        loss = tiny.plain_loss(plain, shard, tiny.totals(shard))
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=tolerance)
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=10 * tolerance)
        assert metrics["train/ppo_kl"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_resumes(qwen3: Path, tmp_path: Path, precision: str) -> None:
    policy = make(qwen3, precision)
    shard = tiny.batch(8, seed=0)
    policy.train([shard], [tiny.totals(shard)])
    policy.save(tmp_path, 1)
    resumed = make(qwen3, precision)
    assert resumed.load_latest(tmp_path) == 1
    saved, loaded = dict(policy.hf_tensors()), dict(resumed.hf_tensors())
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    expected = policy.train([shard], [tiny.totals(shard)])
    assert resumed.train([shard], [tiny.totals(shard)]) == pytest.approx(expected, rel=1e-3, abs=1e-4)
