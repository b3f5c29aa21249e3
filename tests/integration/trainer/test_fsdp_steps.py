"""FSDP2 learns the same as transformers with AdamW and as Megatron, for every estimator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.fsdp.policy import ShardedPolicy
from sluice_trainer.policy.learning_policy import LearningPolicy
from sluice_trainer.step import head
from tests.cases import quick
from tests.integration.trainer import estimate_steps, plain, tiny
from tests.integration.trainer.test_estimators import ALGORITHMS, same
from tests.integration.trainer.test_teacher import checkpoint

pytestmark = pytest.mark.usefixtures("process_group")

STEPS = 5
TRAINER: dict[str, Any] = {
    "stepsPerBatch": 2,
    "maxTokensPerGpu": 256,
    "optimizer": {"lr": 5e-4, "eps": tiny.EPS},
}


def make(model: Path, /, **changes: Any) -> ShardedPolicy:
    changes["trainer"] = {"backend": "fsdp", **changes.get("trainer", {})}
    timeout = timedelta(seconds=tiny.TIMEOUT)
    return ShardedPolicy(tiny.spec(model, **changes), model_dir=model, timeout=timeout)


def train(policy: LearningPolicy, count: int = 8, seed: int = 0) -> dict[str, float]:
    shard = tiny.batch(count, seed=seed)
    return policy.train([shard], [tiny.totals(shard)])


def weights(policy: LearningPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_tensors()}


def apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name] - tensor).abs().max().item() for name, tensor in second.items())


# Algorithms with sums over ranks of their own. Differences between the others do not depend on the
# backend.
OF_RANKS = ("grpo", "ppo", "optimal_token_baseline", "clip_cov")
OTHERS = tuple(name for name in ALGORITHMS if name not in OF_RANKS)
Trained = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def on_two_ranks(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Train five steps of an algorithm on two ranks; return their results and the weights' file.

    All algorithms of a group are trained together when the first of them is needed.
    """
    root = tmp_path_factory.mktemp("two-ranks")

    @cache
    def train_together(names: tuple[str, ...]) -> dict[str, Trained]:
        jobs = [
            {
                "model": str(qwen3),
                "algorithm": ALGORITHMS[name],
                "steps": STEPS,
                "trainer": {**TRAINER, "backend": "fsdp"},
                "dump": str(root / name),
            }
            for name in names
        ]
        first, second = tiny.run("estimate_steps.py", json.dumps(jobs), world=2)
        assert first == second
        return {n: (result, root / n) for n, result in zip(names, first, strict=True)}

    return lambda name: train_together(OF_RANKS if name in OF_RANKS else OTHERS)[name]


@pytest.mark.parametrize("name", quick((*OF_RANKS, *OTHERS), *OF_RANKS))
def test_five_steps_on_two_ranks_equal_transformers_with_adamw(
    qwen3: Path, tmp_path: Path, name: str, on_two_ranks: Callable[[str], Trained]
) -> None:
    expected = estimate_steps.train(
        str(qwen3),
        algorithm=ALGORITHMS[name],
        steps=STEPS,
        trainer=TRAINER,
        dump=str(tmp_path / "plain"),
        backend=plain.Plain,
    )
    result, file = on_two_ranks(name)
    before = safetensors.torch.load_file(qwen3 / "model.safetensors")
    after = safetensors.torch.load_file(tmp_path / "plain")
    assert apart(after, before) > 1e-3
    assert apart(safetensors.torch.load_file(file), after) < 1e-6
    for ours, theirs in zip(result["history"], expected["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=5e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_megatron_computes_the_same_steps(qwen3: Path, name: str) -> None:
    """Weights and batches are the same."""
    _compare_backends(qwen3, name)


@pytest.mark.parametrize("name", quick(ALGORITHMS, "grpo", "ppo", "kl_cov", "sft"))
def test_megatron_computes_the_same_steps_of_an_adapter(qwen3: Path, name: str) -> None:
    _compare_backends(qwen3, name, lora={"rank": 4})


def _compare_backends(model: Path, name: str, **more: Any) -> None:
    fsdp, megatron = (
        estimate_steps.train(
            str(model), algorithm=ALGORITHMS[name], trainer={**TRAINER, **more, "backend": backend}
        )
        for backend in ("fsdp", "megatron")
    )
    same(fsdp, megatron)


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen3-moe", "glm4-moe"])
def test_megatron_computes_the_same_steps_of_other_families(
    models: dict[str, Path], family: str
) -> None:
    algorithm = {"entropyCoef": 0.01}
    job: dict[str, Any] = {"model": str(models[family]), "algorithm": algorithm}
    job |= {"branches": "bare"}  # tests the family; tests of algorithms train branches
    fsdp, megatron = (
        estimate_steps.train(**job, trainer={**TRAINER, "backend": backend})
        for backend in ("fsdp", "megatron")
    )
    same(fsdp, megatron)


def test_the_rates_follow_the_schedule(qwen3: Path) -> None:
    optimizer = {"lr": 1e-3, "schedule": "linear"}
    policy = make(qwen3, trainer={"steps": 4, "optimizer": optimizer})
    rates = [train(policy, seed=step)["train/lr-pg_0"] for step in range(4)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_norms_and_biases_do_not_decay(models: dict[str, Path]) -> None:
    """The batch has no trained token, so only the decay moves weights."""
    path = models["qwen2"]
    policy = make(path, trainer={"optimizer": {"lr": 1e-2, "weightDecay": 0.5}})
    before = weights(policy)
    policy.train([[]], [BatchTotals(0, 0)])
    for name, tensor in weights(policy).items():
        kept = 1.0 if tensor.dim() == 1 else 1 - 0.5e-2
        assert torch.allclose(tensor, before[name] * kept, atol=1e-7), name


def test_micro_batches_do_not_change_the_result(qwen3: Path) -> None:
    results = []
    for cap in (1, 45, 10_000):
        policy = make(qwen3, trainer={"maxTokensPerGpu": cap})
        results.append((train(policy, 12), weights(policy)))
    for metrics, tensors in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)
        assert apart(tensors, results[0][1]) < 1e-5


def test_gradients_are_freed_after_their_step(qwen3: Path) -> None:
    """Memory that is allocated between steps stays allocated."""
    policy = make(qwen3)
    train(policy)
    assert all(parameter.grad is None for _, parameter in named(policy))


def test_full_recompute_does_not_change_the_result(qwen3: Path) -> None:
    metrics = [train(make(qwen3, trainer={"recompute": word})) for word in ("none", "full")]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-7)


def test_full_recompute_keeps_no_activations_of_layers(models: dict[str, Path]) -> None:
    kept = []
    for word in ("none", "full"):
        policy, count = make(models["qwen3-tied"], trainer={"recompute": word}), [0]

        def note(tensor: torch.Tensor, count: list[int] = count) -> torch.Tensor:
            count[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            train(policy)
        kept.append(count[0])
    assert kept[1] < kept[0] / 2


def test_chunked_logits_do_not_change_the_result(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"entropyCoef": 0.1}
    whole = train(make(qwen3, algorithm=algorithm))
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 5 * tiny.VOCAB)
    assert train(make(qwen3, algorithm=algorithm)) == pytest.approx(whole, rel=1e-5, abs=1e-7)


def test_a_rank_may_be_without_sequences(qwen3: Path) -> None:
    policy = make(qwen3)
    before = weights(policy)
    metrics = policy.train([[]], [BatchTotals(0, 0)])
    assert metrics["train/loss"] == metrics["train/grad_norm"] == 0
    assert apart(weights(policy), before) == 0
    assert policy.log_probs([]) == []


def test_a_loss_that_is_not_finite_stops_before_the_weights(qwen3: Path) -> None:
    policy = make(qwen3)
    before = weights(policy)
    tokens, none = np.arange(4, dtype=np.int32), np.zeros(2, np.float32)
    broken = TrainSequence(tokens, 2, np.ones(2, np.uint8), none, float("nan"))
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        policy.train([[broken]], [BatchTotals(1, 2)])
    assert apart(weights(policy), before) == 0


def test_bf16_trains_close_to_fp32_and_keeps_fp32_weights(qwen3: Path) -> None:
    """Updates that are too small for a bf16 weight add up."""
    optimizer = {"lr": 1e-5, "eps": tiny.EPS}
    exact, rough = (
        make(qwen3, trainer={"precision": precision, "optimizer": optimizer})
        for precision in ("fp32", "bf16")
    )
    pairs = [(train(exact, seed=step), train(rough, seed=step)) for step in range(5)]
    assert pairs[0][1]["train/grad_norm"] == pytest.approx(pairs[0][0]["train/grad_norm"], rel=0.05)
    assert {tensor.dtype for tensor in weights(rough).values()} == {torch.bfloat16}
    start = safetensors.torch.load_file(qwen3 / "model.safetensors")
    moved, roughly = (
        torch.cat([(p.full_tensor() - start[n]).flatten() for n, p in named(policy)])
        for policy in (exact, rough)
    )
    assert torch.cosine_similarity(moved, roughly, dim=0) > 0.9


def named(policy: ShardedPolicy) -> Iterator[tuple[str, Any]]:
    return policy._learner.net.model.named_parameters()


def test_random_weights_are_those_of_the_seed_and_of_the_reference(qwen3: Path) -> None:
    algorithm = {"kl": {"lossCoef": 0.05}}
    model = {"path": str(qwen3), "init": "random"}
    policy, again = (make(qwen3, model=model, algorithm=algorithm) for _ in range(2))
    assert apart(weights(policy), weights(again)) == 0
    stored = safetensors.torch.load_file(qwen3 / "model.safetensors")
    assert apart(weights(policy), stored) > 0.01
    shard = tiny.batch(4, seed=0)
    reference = policy.reference_log_probs(shard)
    assert reference is not None
    for ours, theirs in zip(policy.log_probs(shard), reference, strict=True):
        assert torch.equal(ours, theirs)


def test_values_equal_those_of_a_reward_model_in_transformers(
    qwen3: Path, reward_model: Path
) -> None:
    critic = {"lr": 1e-3, "modelPath": str(reward_model)}
    policy = make(qwen3, algorithm={"estimator": "ppo", "critic": critic})
    model, shard = tiny.hf_reward_model(reward_model), tiny.batch(9, seed=5)
    values = policy.values(shard)
    assert values is not None
    for sequence, ours in zip(shard, values, strict=True):
        with torch.no_grad():
            assert torch.allclose(ours, tiny.hf_values(model, sequence), atol=1e-5)


def test_a_critic_of_tied_embeddings_shares_nothing_with_the_policy(
    models: dict[str, Path],
) -> None:
    algorithm = {"estimator": "ppo", "critic": {"lr": 1e-2}}
    policy = make(models["qwen3-tied"], algorithm=algorithm)
    before, shard = weights(policy), tiny.batch(6, seed=0)
    assert policy.critic is not None
    losses = []
    for _ in range(10):
        values = policy.critic.values(shard)
        pairs = zip(shard, values, strict=True)
        goals = [replace(s, values=v, returns=torch.ones(len(v))) for s, v in pairs]
        losses.append(policy.critic.train([goals], [tiny.totals(goals)])["critic/vf_loss"])
    assert losses[-1] < losses[0] / 4
    assert apart(weights(policy), before) == 0


@pytest.mark.parametrize(
    "kind", [{}, {"divergence": "jsd", "beta": 0.3}, {"divergence": "reverse_kl"}], ids=str
)
def test_a_teacher_gives_the_same_as_under_megatron(
    models: dict[str, Path], tmp_path: Path, kind: dict[str, Any]
) -> None:
    """The teacher is another model with the same vocabulary."""
    student, other = (checkpoint(models[name], tmp_path / name) for name in ("qwen3", "qwen3-tied"))
    distillation = {"coef": 0.5, "teacher": {"path": str(other)}, **kind}
    algorithm = {"estimator": "rloo", "distillation": distillation}
    fsdp, megatron = (
        estimate_steps.train(
            str(student), algorithm=algorithm, trainer={**TRAINER, "backend": backend}
        )
        for backend in ("fsdp", "megatron")
    )
    same(fsdp, megatron)
    assert abs(fsdp["history"][0]["train/opd_reverse_kl"]) > 0.01
