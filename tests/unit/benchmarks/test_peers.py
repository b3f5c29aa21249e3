"""The comparison with TRL gives it the job's own settings, and calls curves equal within their
spread.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers import CASES
from benchmarks.peers_settings import NoEqualSettingError, trl_settings
from benchmarks.peers_table import Comparison, Step, by_run, compared, median_seconds, seeds_of
from sluice.api import RLJobSpec, load_job

CASE = CASES["quickstart"]


def quickstart(*overrides: str) -> RLJobSpec:
    return load_job(CASE.manifest, [*CASE.overrides, *overrides]).spec


def values(spec: RLJobSpec, micro_batches: int = 1) -> dict[str, Any]:
    return {
        setting.name: setting.value for setting in trl_settings(spec, micro_batches=micro_batches)
    }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [],
            {
                "max_steps": 120,
                "per_device_train_batch_size": 256,
                "gradient_accumulation_steps": 1,
                "num_generations": 8,
                "max_completion_length": 4,
                "loss_type": "dapo",
                "scale_rewards": "group",
                "epsilon": 0.2,
                "epsilon_high": 0.28,
                "beta": 0.0,
                "entropy_coef": 0.1,
                "learning_rate": 1.5e-3,
                "adam_beta2": 0.95,
                "weight_decay": 0.01,
                "max_grad_norm": 1.0,
                "top_k": 0,
                "use_cpu": True,
                "bf16": False,
                "gradient_checkpointing": False,
            },
        ),
        (["algorithm.loss.clip.high=null"], {"epsilon": 0.2, "epsilon_high": 0.2}),
        (["algorithm.normalizeStd=false"], {"scale_rewards": "none"}),
        (["algorithm.kl.lossCoef=0.01", "algorithm.kl.type=k3"], {"beta": 0.01}),
        (["algorithm.entropyCoef=0", "algorithm.aggregation=null"], {"loss_type": "grpo"}),
        (["rollout.sampling.topK=5"], {"top_k": 5}),
        (["data.seed=3"], {"seed": 3}),
    ],
    ids=[
        "the quickstart",
        "one bound",
        "no deviation",
        "KL in the loss",
        "mean of sequences",
        "likeliest tokens",
        "seed",
    ],
)
def test_trl_trains_with_the_settings_of_the_job(
    overrides: list[str], expected: dict[str, Any]
) -> None:
    settings = values(quickstart(*overrides))
    assert {name: settings[name] for name in expected} == expected


def test_parts_of_a_step_make_one_optimizer_step() -> None:
    settings = values(quickstart(), micro_batches=4)
    assert settings["per_device_train_batch_size"] == 64
    assert settings["gradient_accumulation_steps"] == settings["steps_per_generation"] == 4


def test_the_case_for_a_gpu_trains_in_bf16() -> None:
    case = CASES["reasoning"]
    settings = values(load_job(case.manifest, list(case.overrides)).spec, case.micro_batches)
    assert (settings["bf16"], settings["use_cpu"], settings["loss_type"]) == (True, False, "grpo")
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 512


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["algorithm.aggregation=sequence_mean"], "algorithm.entropyCoef"),
        (["algorithm.estimator=rloo"], "algorithm.estimator"),
        (["algorithm.loss.type=cispo"], "algorithm.loss.type"),
        (["algorithm.kl.coef=0.1"], "algorithm.kl.coef"),
        (["algorithm.kl.lossCoef=0.1"], "algorithm.kl.type"),
        (["algorithm.loss.clip.dual=3"], "algorithm.loss.clip.dual"),
        (["algorithm.offPolicy.method=tis"], "algorithm.offPolicy"),
        (["rollout.mode=async", "rollout.maxStaleness=1"], "rollout.mode"),
        (["trainer.stepsPerBatch=2"], "trainer.stepsPerBatch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_trl_does_not_have_is_refused_by_name(
    overrides: list[str], field: str
) -> None:
    with pytest.raises(NoEqualSettingError, match=rf"^spec\.{field}: no equal setting in TRL"):
        trl_settings(quickstart(*overrides))


@pytest.mark.parametrize(
    ("ours", "theirs", "agrees"),
    [
        ([0.50, 0.60, 0.70], [0.55, 0.65, 0.75], True),
        ([0.50, 0.51, 0.52], [0.60, 0.61, 0.62], False),
        ([0.60, 0.61, 0.62], [0.50, 0.51, 0.52], False),
        ([0.9, 0.9, 0.9], [0.9, 0.9, 0.9], True),
        ([0.9, 0.9, 0.9], [0.8, 0.8, 0.8], False),
    ],
    ids=["within the spread", "below", "above", "equal", "no spread, but apart"],
)
def test_curves_agree_where_the_spread_over_seeds_explains_their_difference(
    ours: list[float], theirs: list[float], agrees: bool
) -> None:
    assert Comparison(ours, theirs).agrees is agrees


def test_the_spread_is_that_of_students_t() -> None:
    # Standard deviations of 0.1 in both: 2.776 x sqrt(2 x 0.01 / 3).
    comparison = Comparison([0.4, 0.5, 0.6], [0.5, 0.6, 0.7])
    assert comparison.allowed == pytest.approx(0.2267, abs=1e-4)
    assert comparison.difference == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("ours", "theirs"), [([0.5], [0.5]), ([0.5, 0.6], [0.5])], ids=["one seed", "unequal"]
)
def test_without_seeds_to_compare_nothing_is_said(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="expected as many of both"):
        _ = Comparison(ours, theirs).agrees


def test_a_seed_that_only_one_has_run_does_not_count() -> None:
    def steps(system: str, seed: int, reward: float) -> list[Step]:
        return [Step(system, seed, n, 2.0 * n, reward, 1.0, 3.0) for n in (2, 1)]

    runs = by_run([*steps("sluice", 0, 0.1), *steps("TRL", 0, 0.2), *steps("sluice", 1, 0.3)])
    assert seeds_of(runs, "TRL") == [0]
    assert [step.step for step in runs["TRL", 0]] == [1, 2]
    comparison = compared(runs, "TRL", slice(0, 2))
    assert (list(comparison.ours), list(comparison.theirs)) == ([0.1], [0.2])


def test_a_slow_start_does_not_count_in_the_seconds_of_a_step() -> None:
    ends = [0.0, 60.0, 90.0, 91.0, 92.5, 93.5, 95.0, 96.0]
    assert median_seconds([Step("TRL", 0, n, end, 0, 0, 0) for n, end in enumerate(ends)]) == 1.25
