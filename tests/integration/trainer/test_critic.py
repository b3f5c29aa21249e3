"""The critic of PPO equals transformers, trains separately, and resumes exactly."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.memory import staging
from tests.cases import quick
from tests.integration.trainer import estimate_steps, tiny
from tests.integration.trainer.test_estimators import run_on_ranks, same

pytestmark = pytest.mark.usefixtures("process_group")
PPO: dict[str, Any] = {"estimator": "ppo", "gamma": 0.99, "lambda": 0.9, "critic": {"lr": 1e-3}}


def make(model: Path, **critic: Any) -> MegatronPolicy:
    algorithm = {"estimator": "ppo", "critic": {"lr": 1e-3, **critic}}
    spec = tiny.spec(model, algorithm=algorithm)
    return MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


def with_unrelated_returns(policy: MegatronPolicy, seed: int) -> list[TrainSequence]:
    """Return a batch with the critic's values, and unrelated returns."""
    shard = tiny.batch(8, seed=seed)
    assert policy.critic is not None
    random = np.random.default_rng(seed)
    goals = [
        torch.from_numpy(random.normal(size=s.response_length).astype(np.float32)) for s in shard
    ]
    values = policy.critic.values(shard)
    return [replace(s, values=v, returns=g) for s, v, g in zip(shard, values, goals, strict=True)]


def weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_tensors()}


def test_values_equal_those_of_a_reward_model_in_transformers(
    qwen3: Path, reward_model: Path
) -> None:
    policy, plain = make(qwen3, modelPath=str(reward_model)), tiny.hf_reward_model(reward_model)
    assert policy.critic is not None
    shard = tiny.batch(9, seed=5)
    for sequence, values in zip(shard, policy.critic.values(shard), strict=True):
        with torch.no_grad():
            assert torch.allclose(values, tiny.hf_values(plain, sequence), atol=1e-5)


def test_three_steps_of_the_critic_equal_transformers_with_adamw(
    qwen3: Path, reward_model: Path
) -> None:
    """The reference computes the value loss over one sequence at a time."""
    policy, plain = (
        make(qwen3, modelPath=str(reward_model), clip=0.05),
        tiny.hf_reward_model(reward_model),
    )
    adam = torch.optim.AdamW(
        plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=tiny.EPS, weight_decay=0.0
    )
    for step in range(3):
        shard = with_unrelated_returns(policy, step)
        metrics = policy.train([shard], [tiny.totals(shard)])
        loss = torch.zeros(())
        for s in shard:
            assert s.values is not None
            assert s.returns is not None
            now, mask = tiny.hf_values(plain, s), torch.from_numpy(s.loss_mask).float()
            bounded = s.values + (now - s.values).clamp(-0.05, 0.05)
            errors = torch.maximum((now - s.returns) ** 2, (bounded - s.returns) ** 2) / 2
            loss = loss + (errors * mask).sum() / mask.sum().clamp(min=1) / len(shard)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert policy.critic is not None
    shard = tiny.batch(4, seed=9)
    for sequence, values in zip(shard, policy.critic.values(shard), strict=True):
        with torch.no_grad():
            assert torch.allclose(values, tiny.hf_values(plain, sequence), atol=1e-4)


def test_the_critic_of_a_language_model_starts_at_zero_and_learns(qwen3: Path) -> None:
    policy = make(qwen3)
    assert policy.critic is not None
    shard = tiny.batch(6, seed=0)
    assert all((values == 0).all() for values in policy.critic.values(shard))
    losses = []
    for _ in range(20):
        values = policy.critic.values(shard)
        goals = [
            replace(s, values=v, returns=torch.ones(len(v)))
            for s, v in zip(shard, values, strict=True)
        ]
        losses.append(policy.critic.train([goals], [tiny.totals(goals)])["critic/vf_loss"])
    assert losses[-1] < losses[0] / 4


def test_the_critic_shares_no_tensor_with_the_weights_of_engines(qwen3: Path) -> None:
    policy = make(qwen3)
    before = weights(policy)
    shard = with_unrelated_returns(policy, 0)
    assert policy.critic is not None
    policy.critic.train([shard], [tiny.totals(shard)])
    after = weights(policy)
    assert list(after) == [name for name, _ in tiny.hf_model(qwen3).named_parameters()]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_in_its_warm_up_only_the_critic_is_trained(qwen3: Path) -> None:
    policy = make(qwen3, warmupSteps=2)
    before = weights(policy)
    seen = []
    for step in range(3):
        shard = with_unrelated_returns(policy, step)
        metrics = policy.train([shard], [tiny.totals(shard)])
        same = all(torch.equal(before[name], tensor) for name, tensor in weights(policy).items())
        seen.append((policy.step, "critic/vf_loss" in metrics, "train/loss" in metrics, same))
    assert seen == [(1, True, False, True), (2, True, False, True), (3, True, True, False)]


SPREAD: dict[str, tuple[str, dict[str, int], int]] = {
    "virtual pipeline": ("qwen3-tied", {"pipeline": 2, "virtualPipeline": 2}, 2),
    "expert": ("qwen3-moe", {"expert": 2}, 2),
    "expert x tensor": ("qwen3-moe", {"expert": 2, "tensor": 2}, 2),
    "expert x pipeline": ("qwen3-moe-mixed", {"expert": 2, "pipeline": 2}, 4),
}


# Layouts that are part of another one.
PARTS_OF_OTHERS = {"expert", "expert x pipeline"}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in PARTS_OF_OTHERS else [])
        for name in SPREAD
    ],
)
def test_a_critic_under_every_kind_of_layout_equals_one_rank(
    models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    """Values, losses, gradient norms, the policy, and resuming from a checkpoint, if any."""
    family, parallelism, world = SPREAD[layout]
    job: dict[str, Any] = {"model": str(models[family]), "algorithm": PPO}
    through = estimate_steps.train(**job, steps=3)
    spread = {
        "trainer": {"parallelism": parallelism, "processesPerNode": world},
        "checkpoints": str(tmp_path),
    }
    (result,) = run_on_ranks(world, {**job, **spread, "steps": 2, "save_at": 2})
    same(result, {name: through[name][:2] for name in ("history", "advantages")})
    resumed = estimate_steps.train(**job, steps=3, checkpoints=str(tmp_path))
    assert resumed["resumed"] == 2
    same(resumed, {name: through[name][2:] for name in ("history", "advantages")})


@pytest.mark.parametrize("init", quick(("pretrained", "random"), "random"))
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    qwen3: Path, tmp_path: Path, init: str
) -> None:
    options: dict[str, Any] = {
        "model": str(qwen3),
        "algorithm": PPO,
        "trainer": {"stepsPerBatch": 2},
        "init": init,
    }
    through = estimate_steps.train(**options, steps=5)
    estimate_steps.train(**options, steps=2, save_at=2, checkpoints=str(tmp_path))
    (resumed,) = run_on_ranks(1, {**options, "steps": 5, "checkpoints": str(tmp_path)})
    later = {name: through[name][2:] for name in ("history", "advantages")}
    assert resumed == {**through, **later, "resumed": 2}


@pytest.mark.parametrize("save_at", [1, pytest.param(3, marks=pytest.mark.long)])
def test_the_schedule_of_the_policy_starts_after_the_warm_up_and_ends_with_the_run(
    qwen3: Path, tmp_path: Path, save_at: int
) -> None:
    """A run that is resumed, in the warm-up or after it, is the same bit for bit."""
    options: dict[str, Any] = {
        "model": str(qwen3),
        "algorithm": {**PPO, "critic": {"lr": 2e-3, "warmupSteps": 2}},
        "trainer": {"steps": 5, "optimizer": {"lr": 1e-3, "schedule": "linear"}},
    }
    through = estimate_steps.train(**options, steps=5)
    rates = [(metrics.get("train/lr-pg_0"), metrics["critic/lr"]) for metrics in through["history"]]
    policy, critic = [None, None, 1e-3, 2e-3 / 3, 1e-3 / 3], [2e-3, 1.6e-3, 1.2e-3, 0.8e-3, 0.4e-3]
    assert rates == [
        (p and pytest.approx(p), pytest.approx(c)) for p, c in zip(policy, critic, strict=True)
    ]
    estimate_steps.train(**options, steps=save_at, save_at=save_at, checkpoints=str(tmp_path))
    (resumed,) = run_on_ranks(1, {**options, "steps": 5, "checkpoints": str(tmp_path)})
    later = {name: through[name][save_at:] for name in ("history", "advantages")}
    assert resumed == {**through, **later, "resumed": save_at}


def test_a_checkpoint_of_two_ranks_continues_on_one(qwen3: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": str(qwen3), "algorithm": PPO}
    through = estimate_steps.train(**options, steps=4)
    run_on_ranks(2, {**options, "steps": 2, "save_at": 2, "checkpoints": str(tmp_path)})
    resumed = estimate_steps.train(**options, steps=4, checkpoints=str(tmp_path))
    same(resumed, {name: through[name][2:] for name in ("history", "advantages")})


def test_ppo_refuses_a_checkpoint_without_a_critic(qwen3: Path, tmp_path: Path) -> None:
    plain = MegatronPolicy(
        tiny.spec(qwen3), model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT)
    )
    shard = tiny.batch(4, seed=0)
    plain.train([shard], [tiny.totals(shard)])
    tiny.save(plain, tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*iter_0000001/critic"):
        make(qwen3).load_latest(tmp_path)


def test_the_memory_of_the_critics_copies_is_reserved_before_the_first_step(
    qwen3: Path, tmp_path: Path
) -> None:
    policy = make(qwen3)
    policy.reserve_copies()
    staging.finish_reservations()
    with patch.object(staging, "host_memory") as got:
        policy.begin_save(tmp_path, 0, background=True)
    assert policy.finish_save(tmp_path, wait=True) == 0
    got.assert_not_called()
    assert (tmp_path / "iter_0000000/critic").is_dir()
