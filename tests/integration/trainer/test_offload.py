"""A trainer that offloads its memory between steps trains the same model, to the bit."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_trainer.megatron.frozen_model import MegatronFrozenModel
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.megatron.step.learner import MegatronLearner
from sluice_trainer.memory.offload import OffloadableMemory
from tests.integration.trainer import tiny

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="on GPUs not even two equal runs are equal to the bit"
    ),
]
PPO: dict[str, Any] = {"estimator": "ppo", "critic": {"lr": 1e-3}, "kl": {"lossCoef": 0.01}}


def make(model: Path, algorithm: dict[str, Any] | None = None, **trainer: Any) -> MegatronPolicy:
    spec = tiny.spec(
        model, algorithm=algorithm or {}, trainer=trainer, rollout={"gpusPerReplica": 0}
    )
    return MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


def step(policy: MegatronPolicy, seed: int) -> dict[str, float]:
    shard = tiny.batch(8, seed=seed)
    if policy.critic:
        values = policy.critic.values(shard)
        shard = [
            replace(s, values=v, returns=torch.ones(len(v)))
            for s, v in zip(shard, values, strict=True)
        ]
    return policy.train([shard], [tiny.totals(shard)])


def weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_tensors()}


def held(policy: MegatronPolicy) -> int:
    """Return the bytes of weights, gradients and optimizer states that the policy holds."""
    away = policy._offload
    storages = [s for part in (*away._weights, *away._rest) for s, _ in part._offloaded]
    return sum(storage.nbytes() for storage in storages)


@pytest.mark.parametrize(
    ("algorithm", "trainer"),
    [
        pytest.param({}, {}, id="grpo"),
        pytest.param(PPO, {}, id="ppo with critic and reference"),
        pytest.param(PPO, {"lora": {"rank": 4}}, id="ppo with adapters"),
    ],
)
@pytest.mark.parametrize(
    ("what", "precision"),
    [
        ("optimizer", "fp32"),
        ("all", "bf16"),
        pytest.param("optimizer", "bf16", marks=pytest.mark.long),
        pytest.param("all", "fp32", marks=pytest.mark.long),
    ],
)
def test_training_goes_on_to_the_bit(
    qwen3: Path,
    tmp_path: Path,
    what: str,
    precision: str,
    algorithm: dict[str, Any],
    trainer: dict[str, Any],
) -> None:
    plain = make(qwen3, algorithm, precision=precision, **trainer)
    shared = make(qwen3, algorithm, precision=precision, colocate=True, offload=what, **trainer)
    for seed in range(3):
        assert step(shared, seed) == step(plain, seed)
        shared.offload(weights=False)
        sent = weights(shared)  # the engines have room for their weights
        shared.offload(weights=True)
        assert held(shared) == 0
        assert all(torch.equal(sent[name], tensor) for name, tensor in weights(plain).items())
        if seed == 1:
            shared.restore(weights_only=True)  # an engine has joined
            assert all(torch.equal(sent[name], tensor) for name, tensor in weights(shared).items())
            shared.offload(weights=True)
        shared.restore()
    tiny.save(shared, tmp_path, 3)
    resumed = make(qwen3, algorithm, precision=precision, colocate=True, offload=what, **trainer)
    resumed.offload(weights=True)
    resumed.restore()
    assert resumed.load_latest(tmp_path) == 3
    assert step(resumed, 3) == step(plain, 3)


def test_the_memory_of_all_parameters_and_states_is_released(qwen3: Path) -> None:
    policy = make(qwen3, PPO, precision="bf16", colocate=True, offload="all")
    step(policy, 0)
    policy.offload(weights=True)
    assert policy.critic is not None
    assert isinstance(policy._reference, MegatronFrozenModel)
    left = [p for chunk in policy._reference.chunks for p in chunk.parameters()]
    for learner in (policy._learner, policy.critic.learner):
        assert isinstance(learner, MegatronLearner)
        left += [p for chunk in learner.chunks for p in chunk.parameters()]
        left += [buffer.grad_data for chunk in learner.chunks for buffer in chunk.buffers]
        for part in learner.optimizer.chained_optimizers:
            left += [p for group in part.optimizer.param_groups for p in group["params"]]
            left += [
                v for state in part.optimizer.state.values() for v in state.values() if v.dim()
            ]
    assert len(left) > 100
    assert sum(tensor.untyped_storage().nbytes() for tensor in left) == 0


def test_views_of_one_storage_come_back_as_views_of_one_storage() -> None:
    whole = torch.arange(10.0)
    view, other = whole[2:5], torch.ones(3, dtype=torch.bfloat16)
    storages = OffloadableMemory(lambda: [view, other, whole])
    for value in (7.0, 8.0):
        whole[3] = value
        storages.offload()
        storages.offload()  # has no effect
        assert whole.untyped_storage().nbytes() == 0
        storages.restore()
        storages.restore()
        assert view.tolist() == [2.0, value, 4.0]
        assert other.tolist() == [1.0] * 3
