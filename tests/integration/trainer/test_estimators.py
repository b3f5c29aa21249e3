"""All estimators, from rewards to weights, give the same on one, two and four ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from sluice_trainer.algorithms.aggregation import Aggregation
from tests.cases import quick
from tests.integration.trainer import estimate_steps, tiny

pytestmark = pytest.mark.usefixtures("process_group")

KL: dict[str, Any] = {"kl": {"coef": 0.1, "type": "k2"}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {**KL, "normalizeAdvantages": True},
    "dr_grpo": {"estimator": "dr_grpo"},
    "gspo": {"estimator": "gspo", "loss": {"clip": {"low": 0.001, "high": 0.002}}},
    "cispo": {
        "estimator": "cispo",
        "offPolicy": {"method": "icepop", "low": 0.4, "high": 5.0, "level": "geometric"},
    },
    "adaptive_kl": {"kl": {**KL["kl"], "adaptive": {"target": 1e-3, "horizon": 100}}},
    "rloo": {"estimator": "rloo", **KL, "offPolicy": {"opsmDelta": 0.0, "oldLogProbs": "rollout"}},
    "opo": {"estimator": "opo", "aggregation": "prompt_mean", **KL},
    "gpg": {"estimator": "gpg", "loss": {"type": "reinforce"}},
    "grpo_passk": {"estimator": "grpo_passk", "overlong": {"buffer": 36, "penalty": 0.5}},
    "max_rl": {"estimator": "max_rl", **KL},
    "optimal_token_baseline": {"estimator": "optimal_token_baseline", **KL},
    "gdpo": {
        "estimator": "gdpo",
        "rewardParts": [{"name": "right"}, {"name": "format", "weight": 0.5}],
        **KL,
    },
    "reinforce_plus_plus": {"estimator": "reinforce_plus_plus", "gamma": 0.95, **KL},
    "reinforce_plus_plus_baseline": {"estimator": "reinforce_plus_plus_baseline", **KL},
    "remax": {"estimator": "remax", **KL},
    "ppo": {
        "estimator": "ppo",
        "gamma": 0.99,
        "lambda": 0.9,
        "critic": {"lr": 1e-3},
        "aggregation": "token_mean",
        **KL,
    },
    "clip_cov": {
        "offPolicy": {"method": "tis", "high": 1.5, "level": "sequence", "normalize": True},
        "loss": {
            "type": "clip_cov",
            "clip": {"low": 0.001, "high": 0.002},
            "covariance": {"ratio": 0.2, "lower": 0.05, "upper": 2.0},
        },
    },
    "kl_cov": {
        "offPolicy": {"method": "icepop", "low": 0.4, "high": 3.0, "normalize": True},
        "loss": {"type": "kl_cov", "covariance": {"ratio": 0.1}},
    },
    "sft": {"loss": {"type": "sft"}, "kl": {"lossCoef": 0.1}},
}


SEATS: dict[str, Any] = {
    "algorithm": {**KL, "turnAdvantage": {"gamma": 0.9}},
    "branches": "seated",
    "trainer": {"stepsPerBatch": 2},
}


def same(actual: Any, expected: Any) -> None:
    """Assert that two runs are equal up to the rounding of another order of sums."""
    assert len(actual["history"]) == len(expected["history"])
    for ours, theirs in zip(actual["history"], expected["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-5)
    for ours, theirs in zip(actual["advantages"], expected["advantages"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, values in ours.items():
            assert values == pytest.approx(theirs[key], rel=1e-3, abs=2e-5), key


def run_on_ranks(world: int, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Run each job on `world` ranks and return its result, which all ranks must agree on."""
    ranks = tiny.run("estimate_steps.py", json.dumps(jobs), world=world)
    assert all(results == ranks[0] for results in ranks)
    return list(ranks[0])


@pytest.fixture(scope="module")
def on_two_ranks(qwen3: Path) -> dict[str, dict[str, Any]]:
    trainer = {"stepsPerBatch": 2}
    jobs: list[dict[str, Any]] = [
        {"model": str(qwen3), "algorithm": algorithm, "trainer": trainer}
        for algorithm in ALGORITHMS.values()
    ]
    jobs.append({"model": str(qwen3), **SEATS})
    return dict(zip([*ALGORITHMS, "seats"], run_on_ranks(2, *jobs), strict=True))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_equal_one(
    qwen3: Path, name: str, on_two_ranks: dict[str, dict[str, Any]]
) -> None:
    alone = estimate_steps.train(
        str(qwen3), algorithm=ALGORITHMS[name], trainer={"stepsPerBatch": 2}
    )
    same(on_two_ranks[name], alone)


def test_seats_and_turns_on_two_ranks_equal_one(
    qwen3: Path, on_two_ranks: dict[str, dict[str, Any]]
) -> None:
    alone = estimate_steps.train(str(qwen3), **SEATS)
    same(on_two_ranks["seats"], alone)
    assert {"multi_turn/seat/white/reward", "multi_turn/seat/black/reward"} <= set(
        alone["history"][0]
    )
    of_white = [row for key, row in alone["advantages"][0].items() if key.endswith("/0")]
    assert all(len(set(row)) <= 2 for row in of_white), "one for each of two turns"
    assert any(len(set(row)) == 2 for row in of_white)


def test_four_ranks_of_which_one_has_no_sequences_equal_one(qwen3: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {"model": str(qwen3), "algorithm": ALGORITHMS[name], "trainer": {"maxTokensPerGpu": 50}}
        for name in ("reinforce_plus_plus", "gspo", "ppo", "clip_cov")
    ]
    for job, spread in zip(jobs, run_on_ranks(4, *jobs), strict=True):
        same(spread, estimate_steps.train(**job))


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        pytest.param({"tensor": 2}, 2, marks=pytest.mark.long),
        ({"pipeline": 2}, 2),
        pytest.param({"context": 2}, 2, marks=pytest.mark.long),
        pytest.param({"tensor": 2, "context": 2}, 4, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_critic_spread_like_the_policy_equals_one_rank(
    models: dict[str, Path], layout: dict[str, int], world: int
) -> None:
    """The critic's embeddings are not tied, and the loss has all its sums over sequences."""
    algorithm = {
        **ALGORITHMS["ppo"],
        "loss": {"type": "gspo"},
        "offPolicy": {"method": "tis", "level": "sequence"},
    }
    job: dict[str, Any] = {"model": str(models["qwen3-tied"]), "algorithm": algorithm}
    (spread,) = run_on_ranks(
        world, {**job, "trainer": {"parallelism": layout, "processesPerNode": world}}
    )
    same(spread, estimate_steps.train(**job))


@pytest.mark.parametrize(
    ("spread", "world"),
    [
        pytest.param({"parallelism": {"tensor": 2}}, 2, id="vocabulary over two ranks"),
        pytest.param({"parallelism": {"pipeline": 2}}, 2, id="pipeline", marks=pytest.mark.long),
        pytest.param({"parallelism": {"context": 2}}, 2, id="context"),
        pytest.param({"backend": "fsdp"}, 2, id="fsdp"),
    ],
)
def test_token_baselines_are_the_same_however_the_model_is_spread(
    models: dict[str, Path], spread: dict[str, Any], world: int
) -> None:
    job: dict[str, Any] = {
        "model": str(models["qwen3-tied"]),
        "algorithm": ALGORITHMS["optimal_token_baseline"],
    }
    (on_ranks,) = run_on_ranks(world, {**job, "trainer": {**spread, "processesPerNode": world}})
    alone = estimate_steps.train(**job)
    same(on_ranks, alone)
    assert any(len(set(row)) > 2 for row in alone["advantages"][0].values()), (
        "advantages differ by token"
    )


# Others divide their sums as one of these.
@pytest.mark.parametrize(
    "name",
    quick(
        ALGORITHMS,
        *("grpo", "gspo", "reinforce_plus_plus", "optimal_token_baseline", "ppo", "kl_cov", "sft"),
    ),
)
def test_micro_batches_do_not_change_the_result(qwen3: Path, name: str) -> None:
    job: dict[str, Any] = {"model": str(qwen3), "algorithm": ALGORITHMS[name], "steps": 1}
    several = 2 if name == "kl_cov" else 1  # on policy its penalty is 0
    alone, together = (
        estimate_steps.train(**job, trainer={"maxTokensPerGpu": cap, "stepsPerBatch": several})
        for cap in (1, 10_000)
    )
    same(alone, together)


def test_a_failed_response_is_not_a_baseline_and_not_trained(qwen3: Path) -> None:
    result = estimate_steps.train(str(qwen3), algorithm={"estimator": "rloo"}, steps=1)
    group, index = estimate_steps.FAILED
    assert f"{group}/{index}/0" not in result["advantages"][0]
    sequences, _ = estimate_steps.batch(0, ranks=1, steps=1)
    rewards = {s.index: s.reward for s in sequences if s.group_id == group and s.index != index}
    for sample, reward in rewards.items():
        others = [r for other, r in rewards.items() if other != sample]
        row = result["advantages"][0][f"{group}/{sample}/0"]
        assert row == pytest.approx([reward - sum(others) / len(others)] * len(row), abs=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "backend"),
    [
        *((aggregation, "megatron") for aggregation in get_args(Aggregation)),
        ("token_mean", "fsdp"),  # what aggregations do does not depend on the backend
    ],
)
def test_a_sample_has_the_same_weight_in_one_sequence_and_in_branches(
    qwen3: Path, aggregation: Aggregation, backend: str
) -> None:
    """Each token is trained once and in its context, however a sample is cut into sequences."""
    algorithm = {"estimator": "rloo", "aggregation": aggregation, **KL}
    job: dict[str, Any] = {"model": str(qwen3), "algorithm": algorithm}
    trainer = {"backend": backend, "maxTokensPerGpu": 1}
    whole, halved = (
        estimate_steps.train(**job, trainer=trainer, branches=branches)
        for branches in ("bare", "halved")
    )
    for branches, sequence in zip(halved["history"], whole["history"], strict=True):
        assert branches == pytest.approx(sequence, rel=2e-3, abs=1e-5)
    rows = halved["advantages"][-1]
    for key, row in whole["advantages"][-1].items():
        branch = key.removesuffix("0") + "1"
        assert rows[key] == rows[branch] == pytest.approx(row, rel=1e-3, abs=2e-5)


def test_whitened_advantages_have_mean_zero_and_variance_one_over_all_ranks(qwen3: Path) -> None:
    algorithm = {"estimator": "reinforce_plus_plus", "gamma": 0.9}
    (result,) = run_on_ranks(2, {"model": str(qwen3), "algorithm": algorithm, "steps": 1})
    advantages = result["advantages"][0]
    _, groups = estimate_steps.batch(0, ranks=1, steps=1)
    masks = {
        f"{group.group_id}/{sample.index}/{branch}": sequence.loss_mask
        for group in groups
        for sample in group.samples
        for branch, sequence in enumerate(sample.sequences)
    }
    tokens = [
        value
        for key, row in advantages.items()
        for value, mask in zip(row, masks[key], strict=True)
        if mask
    ]
    mean = sum(tokens) / len(tokens)
    assert mean == pytest.approx(0, abs=1e-5)
    assert sum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1) == pytest.approx(
        1, abs=1e-4
    )


@pytest.mark.parametrize("layout", quick(("tensor", "pipeline", "context"), "tensor"))
@pytest.mark.parametrize("name", quick(("clip_cov", "kl_cov"), "clip_cov"))
def test_the_same_tokens_are_selected_under_every_layout(
    models: dict[str, Path], name: str, layout: str
) -> None:
    """Four ranks: two pairs have a share of the sequences each, and split the model."""
    job: dict[str, Any] = {"model": str(models["qwen3-tied"]), "algorithm": ALGORITHMS[name]}
    alone = estimate_steps.train(**job, trainer={"stepsPerBatch": 2})
    assert all(0.02 < step["train/cov_frac"] < 0.5 for step in alone["history"])
    trainer = {"stepsPerBatch": 2, "parallelism": {layout: 2}, "processesPerNode": 4}
    (spread,) = run_on_ranks(4, {**job, "trainer": trainer})
    same(spread, alone)


def test_the_coefficient_follows_the_divergence_and_is_in_the_checkpoint(
    qwen3: Path, tmp_path: Path
) -> None:
    """With 19 responses a step and no divergence at first, it falls by 0.2 * 19 / 100."""
    job: dict[str, Any] = {"model": str(qwen3), "algorithm": ALGORITHMS["adaptive_kl"]}
    through = estimate_steps.train(**job, steps=3)
    first, second, third = (step["rollout/kl_coef"] for step in through["history"])
    assert first == 0.1
    assert second == pytest.approx(0.1 * (1 - 0.2 * 19 / 100))
    assert third != second
    estimate_steps.train(**job, steps=2, save_at=2, checkpoints=str(tmp_path))
    resumed = estimate_steps.train(**job, steps=3, checkpoints=str(tmp_path))
    assert resumed["history"] == through["history"][2:]
