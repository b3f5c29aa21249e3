"""With `trainer.fakeQuantize` FSDP2 computes with the weights of quantized engines.

The judge is transformers, with weights that were quantized and dequantized by the published
schemes. An engine with `rollout.precision` equals it too (tests/integration/weights).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sluice.api.groups.rollout import Precision
from sluice.engines.plugin_common.precision import is_quantized
from sluice_trainer.fsdp.fake_quantize import fake_quantize
from sluice_trainer.model.quantize import quantized
from tests.integration.trainer import tiny
from tests.integration.trainer.test_fsdp_steps import apart, make, train, weights
from tests.integration.weights.test_quantized import dequantized

pytestmark = pytest.mark.usefixtures("process_group")
CASES: list[tuple[str, Precision]] = [
    ("qwen3", "int8"),
    ("qwen3", "fp8_block"),
    ("qwen3-moe", "fp8"),
    ("deepseek-v3", "int8"),
]


def judge(model: Path, precision: str) -> Any:
    """Return transformers' model with the weights of a quantized engine."""
    result = tiny.hf_model(model)
    tensors = load_file(model / "model.safetensors")
    codes = dict(quantized(tensors.items(), precision))
    own = {
        name: value.to(tensors[name].dtype) for name, value in dequantized(codes, precision).items()
    }
    # transformers joins the experts of a layer as it loads them.
    other = type(result).from_pretrained(None, config=result.config, state_dict=own)
    return other.eval()


def largest_gap(policy: Any, other: Any) -> float:
    """Return the largest difference of log-probs of response tokens."""
    shard = tiny.batch(4, seed=3)
    with torch.no_grad():
        expected = [tiny.hf_log_probs(other, sequence)[0] for sequence in shard]
    ours = policy.log_probs(shard)
    return max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize(("family", "precision"), CASES)
def test_trainer_and_quantized_engine_have_the_same_log_probs(
    models: dict[str, Path], family: str, precision: Precision
) -> None:
    model, engine = models[family], judge(models[family], precision)
    rollout = {"precision": precision}
    assert largest_gap(make(model, rollout=rollout), engine) > 1e-3
    policy = make(model, rollout=rollout, trainer={"fakeQuantize": True})
    assert largest_gap(policy, engine) < 2e-5
    stored = load_file(model / "model.safetensors")
    assert apart(weights(policy), {n: t.float() for n, t in stored.items()}) == 0


@pytest.mark.parametrize(("family", "precision"), CASES)
def test_gradients_are_those_of_the_quantized_model(
    models: dict[str, Path], family: str, precision: Precision
) -> None:
    shard = tiny.batch(4, seed=3)
    ours, engine = tiny.hf_model(models[family]).float(), judge(models[family], precision).float()
    fake_quantize(ours, precision)
    for model in (ours, engine):
        tiny.plain_loss(model, shard, tiny.totals(shard)).backward()
    expected = dict(engine.named_parameters())
    for name, parameter in ours.named_parameters():
        if (gradient := expected[name].grad) is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient)
    assert any(map(is_quantized, expected))


def test_a_step_with_recomputation_is_the_same(qwen3: Path) -> None:
    changed = []
    for recompute in ("none", "full"):
        trainer = {"fakeQuantize": True, "recompute": recompute}
        policy = make(qwen3, rollout={"precision": "int8"}, trainer=trainer)
        before = weights(policy)
        train(policy)
        changed.append(weights(policy))
        assert apart(changed[-1], before) > 1e-4, "small changes add up in the weights"
    assert apart(*changed) < 1e-6
