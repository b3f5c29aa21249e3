"""Statistics over an optimizer step equal those from the log-probs of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sluice_trainer.algorithms.covariance import random_keys
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.step.packing import MicroBatch
from tests.integration.trainer import tiny

pytestmark = pytest.mark.usefixtures("process_group")
Token = tuple[int, int, int]


def make(model: Path, **algorithm: Any) -> MegatronPolicy:
    spec = tiny.spec(model, algorithm=algorithm, trainer={"stepsPerBatch": 2})
    return MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


def micro_batches(policy: MegatronPolicy, shard: list[TrainSequence]) -> list[MicroBatch]:
    """Return the micro-batches of a second optimizer step, whose old weights are not current."""
    batches = policy._learner.micro_batches(shard, tiny.totals(shard))
    assert len(batches) > 2
    return policy._with_step_statistics(1, batches, shard)


def off_policy(shard: list[TrainSequence], model: Path) -> list[TrainSequence]:
    """Add old log-probs that differ from those of the model."""
    plain, random = tiny.hf_model(model), np.random.default_rng(5)
    with torch.no_grad():
        current = [tiny.hf_log_probs(plain, s)[0] for s in shard]
    return [
        replace(s, old_log_probs=(v + torch.from_numpy(random.normal(0, 0.3, len(v)))).float())
        for s, v in zip(shard, current, strict=True)
    ]


def tokens(model: Path, shard: list[TrainSequence]) -> dict[Token, tuple[float, float, float]]:
    """Return (log-prob, advantage, log ratio) of each trained token by its identity."""
    plain, terms = tiny.hf_model(model), {}
    for s in shard:
        with torch.no_grad():
            current = tiny.hf_log_probs(plain, s)[0]
        assert s.old_log_probs is not None
        for place, trained in enumerate(s.loss_mask):
            if trained:
                gap = float(current[place] - s.old_log_probs[place])
                terms[s.group_id, s.index, place] = (float(current[place]), float(s.advantage), gap)
    return terms


def covariance(terms: dict[Token, tuple[float, float, float]]) -> dict[Token, float]:
    log_prob, advantage = (float(np.mean([values[i] for values in terms.values()])) for i in (0, 1))
    return {token: (value - log_prob) * (a - advantage) for token, (value, a, _) in terms.items()}


def selected(batches: list[MicroBatch], shard: list[TrainSequence]) -> set[Token]:
    result = set()
    for batch in batches:
        assert batch.loss is not None
        assert batch.loss.covariance_mask is not None
        for member, row in zip(batch.members, batch.split(batch.loss.covariance_mask), strict=True):
            result |= {
                (shard[member].group_id, shard[member].index, int(place)) for place in row.nonzero()
            }
    return result


def test_kl_cov_selects_the_largest_covariances_of_the_step(qwen3: Path) -> None:
    shard = off_policy(tiny.batch(12, seed=1), qwen3)
    covariances = covariance(tokens(qwen3, shard))
    count = int(len(covariances) * 0.1)
    assert count == 5
    expected = sorted(covariances, key=lambda token: -covariances[token])[:count]
    policy = make(qwen3, loss={"type": "kl_cov", "covariance": {"ratio": 0.1}})
    assert selected(micro_batches(policy, shard), shard) == set(expected)


def test_clip_cov_draws_from_unclipped_tokens_between_the_bounds(qwen3: Path) -> None:
    shard = off_policy(tiny.batch(12, seed=1), qwen3)
    seen = tokens(qwen3, shard)
    covariances = covariance(seen)

    def clipped(token: Token) -> bool:
        _, advantage, gap = seen[token]
        return bool(np.exp(gap) > 1.2) if advantage > 0 else bool(np.exp(gap) < 0.8)

    candidates = [
        token for token, value in covariances.items() if 0.1 < value < 3.0 and not clipped(token)
    ]
    drawn = dict(zip(candidates, random_keys(1, 0, np.array(candidates)), strict=True))
    count = int(len(covariances) * 0.1)
    assert count < len(candidates) < len(covariances)
    chosen = {"ratio": 0.1, "lower": 0.1, "upper": 3.0}
    policy = make(qwen3, loss={"type": "clip_cov", "covariance": chosen})
    assert selected(micro_batches(policy, shard), shard) == set(
        sorted(candidates, key=lambda t: drawn[t])[:count]
    )
    policy._learner.optimizer_steps = 1
    assert selected(micro_batches(policy, shard), shard) != set(
        sorted(candidates, key=lambda t: drawn[t])[:count]
    )


def test_if_there_are_fewer_candidates_all_are_selected(qwen3: Path) -> None:
    shard = off_policy(tiny.batch(12, seed=1), qwen3)
    third, second = sorted(covariance(tokens(qwen3, shard)).values())[-3:-1]
    # Between the two, because log-probs of Megatron and transformers differ in their last digits.
    lower = (third + second) / 2
    policy = make(
        qwen3,
        loss={
            "type": "clip_cov",
            "covariance": {"ratio": 1.0, "lower": lower, "upper": 99.0},
            "clip": {"high": 99},
        },
    )
    assert 1 <= len(selected(micro_batches(policy, shard), shard)) <= 2


def test_a_step_without_trained_tokens_selects_no_token(qwen3: Path) -> None:
    shard = off_policy(tiny.batch(12, seed=1), qwen3)
    masked = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in shard]
    for loss in ("kl_cov", "clip_cov"):
        assert selected(micro_batches(make(qwen3, loss={"type": loss}), masked), masked) == set()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_are_divided_by_their_mean_over_the_step(qwen3: Path, level: str) -> None:
    shard = off_policy(tiny.batch(12, seed=1), qwen3)
    weights = []
    for s in shard:
        assert s.old_log_probs is not None
        trained = s.loss_mask > 0
        gaps = (s.old_log_probs.numpy() - s.rollout_log_probs)[trained].astype(float)
        if not len(gaps):
            continue
        gaps_by_level: dict[str, Iterable[float]] = {
            "token": gaps,
            "sequence": [np.clip(gaps.sum(), -20, 20)],
            "geometric": [gaps.mean()],
        }
        weights += [min(np.exp(gap), 1.5) for gap in gaps_by_level[level]]
    policy = make(
        qwen3, offPolicy={"method": "tis", "high": 1.5, "level": level, "normalize": True}
    )
    (mean,) = {batch.loss.mean_weight for batch in micro_batches(policy, shard) if batch.loss}
    assert mean == pytest.approx(np.mean(weights), rel=1e-4)
    assert abs(np.mean(weights) - 1) > 0.05
