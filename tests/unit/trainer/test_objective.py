"""The loss of a micro-batch, against the formula worked out by hand."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from sluice.api import Algorithm
from sluice.api.groups.losses import PolicyLossName
from sluice_trainer.algorithms.objective import CustomLoss, LossInputs, Objective, policy_objective

LOG_PROBS = torch.tensor([-1.0, -2.0, -0.5])
ENTROPY = torch.tensor([2.0, 1.0, 9.0])
ADVANTAGES = torch.tensor([1.0, -1.0, 5.0])
WEIGHTS = torch.tensor([0.5, 0.5, 0.0])
ROLLOUT = torch.tensor([-1.1, -1.8, 7.0])
SEQUENCE = torch.tensor([0, 1, 1])


def objective(
    *,
    old: list[float] | None = None,
    ref: list[float] | None = None,
    log_probs: torch.Tensor = LOG_PROBS,
    sequence: torch.Tensor = SEQUENCE,
    custom: CustomLoss | None = None,
    mean_weight: float = 1.0,
    on_policy_mask: torch.Tensor | None = None,
    advantages: torch.Tensor = ADVANTAGES,
    covariance_mask: torch.Tensor | None = None,
    **spec: object,
) -> Objective:
    inputs = LossInputs(
        advantages=advantages,
        loss_weights=WEIGHTS,
        metric_weights=WEIGHTS,
        rollout_log_probs=ROLLOUT,
        sequence=sequence,
        old_log_probs=None if old is None else torch.tensor(old),
        ref_log_probs=None if ref is None else torch.tensor(ref),
        mean_weight=mean_weight,
        on_policy_mask=on_policy_mask,
        covariance_mask=covariance_mask,
    )
    return policy_objective(log_probs, ENTROPY, inputs, Algorithm.model_validate(spec), custom)


def test_on_policy_the_ratio_is_exactly_one() -> None:
    sums = objective().sums
    assert sums["ppo_kl"] == 0
    assert sums["pg_clipfrac"] == 0
    assert sums["pg_loss"] == pytest.approx(-0.5 * 1 + 0.5 * 1)


def test_only_metrics_that_apply_are_reported() -> None:
    assert set(objective().sums) == {
        "loss",
        "pg_loss",
        "pg_clipfrac",
        "ppo_kl",
        "entropy_loss",
        "train_rollout_logprob_abs_diff",
    }


def test_the_difference_from_the_engine_counts_unmasked_tokens() -> None:
    result = objective()
    assert float(result.sums["train_rollout_logprob_abs_diff"]) == pytest.approx((0.1 + 0.2) / 2)
    assert float(result.maxima["train_rollout_logprob_abs_diff_max"]) == pytest.approx(0.2)


def test_on_policy_tokens_have_separate_metrics() -> None:
    sums = objective(on_policy_mask=torch.tensor([0.0, 1.0, 1.0])).sums
    assert float(sums["on_policy_ratio"]) == 0.5
    assert float(sums["train_rollout_logprob_abs_diff_on_policy"]) == pytest.approx(
        0.2 / 2
    )  # still to be divided


def test_the_off_policy_ratio_has_metrics() -> None:
    sums = objective(old=[-1.5, -1.5, 0.0]).sums
    # ratios e^0.5 (clipped to 1.2, A = 1) and e^-0.5 (clipped to 0.8, A = -1)
    assert float(sums["pg_loss"]) == pytest.approx(0.5 * -1.2 + 0.5 * 0.8)
    assert float(sums["pg_clipfrac"]) == 1
    assert float(sums["ppo_kl"]) == pytest.approx(0.5 * -0.5 + 0.5 * 0.5)


def test_entropy_lowers_the_loss() -> None:
    sums = objective(entropyCoef=0.1).sums
    assert float(sums["entropy_loss"]) == pytest.approx(1.5)
    assert float(sums["loss"] - sums["pg_loss"]) == pytest.approx(-0.15)


def test_the_kl_loss_is_added_with_its_coefficient() -> None:
    sums = objective(ref=[-2.0, -2.0, 0.0], kl={"lossCoef": 0.5, "type": "k1"}).sums
    assert float(sums["kl_loss"]) == pytest.approx(0.5)
    assert float(sums["loss"] - sums["pg_loss"]) == pytest.approx(0.25)


def test_unbiased_kl_is_weighted_by_the_ratio() -> None:
    sums = objective(
        old=[-1.5, -2.0, 0.0],
        ref=[-2.0, -2.0, 0.0],
        kl={"lossCoef": 0.5, "type": "k1", "unbiased": True},
    ).sums
    assert float(sums["kl_loss"]) == pytest.approx(0.5 * math.exp(0.5))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("far", [100.0, 1000.0, math.inf, math.nan], ids=str)
def test_a_masked_token_has_no_gradient_however_large_its_ratio(kind: str, far: float) -> None:
    """exp(100) is infinite in float32, and infinity times a mask of 0 is no number."""

    def gradient(masked: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
        result = objective(
            old=[-1.1, -1.9, -masked],
            ref=[-2.0, -2.0, masked],
            log_probs=log_probs,
            kl={"lossCoef": 0.5, "type": kind, "unbiased": True},
        )
        result.loss.backward()
        assert log_probs.grad is not None
        return log_probs.grad, result.sums

    near, near_sums = gradient(0.5)
    distant, distant_sums = gradient(far)
    assert distant.tolist() == near.tolist()
    assert distant_sums == near_sums


@pytest.mark.parametrize("loss", get_args(PolicyLossName))
@pytest.mark.parametrize("far", [-1000.0, 1000.0], ids=str)
def test_a_policy_that_is_far_from_the_old_one_has_a_finite_gradient(loss: str, far: float) -> None:
    """exp(1000) is infinite; beyond e^20 the ratio moves no more (verl)."""
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    result = objective(
        old=[-1.0 - far, -2.0 - far, 0.0],
        log_probs=log_probs,
        covariance_mask=torch.tensor([1.0, 0.0, 0.0]),
        loss={"type": loss},
        offPolicy={"method": "tis", "high": 2.0},
    )
    result.loss.backward()
    assert log_probs.grad is not None
    assert bool(torch.isfinite(log_probs.grad).all())
    assert all(math.isfinite(float(value)) for value in result.sums.values())


def test_a_masked_token_may_have_any_advantage() -> None:
    """A custom estimator may leave advantages of masked tokens undefined."""
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    result = objective(log_probs=log_probs, advantages=torch.tensor([1.0, -1.0, math.inf]))
    result.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.5, 0.5, 0]


def test_kl_loss_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="lossCoef"):
        objective(kl={"lossCoef": 0.5})


def test_tis_weights_the_policy_loss() -> None:
    sums = objective(offPolicy={"method": "tis", "low": 0.0, "high": 1.05}).sums
    first, second = math.exp(0.1), math.exp(-0.2)
    assert float(sums["pg_loss"]) == pytest.approx(-0.5 * 1.05 + 0.5 * second)
    assert float(sums["tis"]) == pytest.approx((first + second) / 2)
    assert float(sums["tis_clipfrac"]) == pytest.approx(0.5)
    assert float(sums["tis_abs"]) == pytest.approx((first - 1 + 1 - second) / 2)
    assert float(sums["ois"]) == 1


def test_rejected_tokens_add_zero_and_count_in_the_mean() -> None:
    """Ratios to the engine e^0.1 and e^-0.2; the masked token's is absurd."""
    sums = objective(offPolicy={"reject": [{"high": 1.15}]}).sums
    assert float(sums["pg_loss"]) == pytest.approx(-0.5)
    assert float(sums["rs_clipfrac"]) == pytest.approx(0.5)
    sums = objective(offPolicy={"veto": 0.85, "method": "tis"}).sums
    assert float(sums["pg_loss"]) == pytest.approx(-0.5 * math.exp(0.1))
    assert float(sums["veto_clipfrac"]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("spec", "first", "second"),
    [
        # ratios e^0.5 for A = 1 and e^-0.5 for A = -1
        (
            {"loss": {"type": "geo_mean", "clip": {"low": 0.4, "high": 0.3}}},
            -math.exp(0.3),
            math.exp(-0.4),
        ),
        (
            {"loss": {"type": "sapo", "gate": {"positive": 1.0, "negative": 2.0}}},
            -4 / (1 + math.exp(1 - math.exp(0.5))),
            2 / (1 + math.exp(-2 * (math.exp(-0.5) - 1))),
        ),
        # pi - pi_old: e^-1 - e^-1.5 = 0.145, e^-2 - e^-1.5 = -0.088
        (
            {"loss": {"type": "dppo_tv", "clip": {"low": 0.1, "high": 0.1}}},
            0.0,
            math.exp(-0.5) * -2.0,
        ),
        (
            {"loss": {"type": "dppo_tv", "clip": {"low": 0.05, "high": 0.2, "dual": 1.5}}},
            1.5 * 1.0,
            0.0,
        ),
        (
            {"loss": {"type": "dppo_kl", "clip": {"low": 1.0, "high": 1.0}}},
            math.exp(0.5) * 1.0,
            math.exp(-0.5) * -2.0,
        ),
    ],
    ids=["geo_mean", "sapo", "dppo_tv", "dppo_tv, dual clip", "dppo_kl"],
)
def test_other_losses_by_hand(spec: dict[str, Any], first: float, second: float) -> None:
    sums = objective(old=[-1.5, -1.5, 0.0], **spec).sums
    assert float(sums["pg_loss"]) == pytest.approx(0.5 * first + 0.5 * second, rel=1e-5)


@pytest.mark.parametrize("loss", ["geo_mean", "sapo", "dppo_tv", "dppo_kl"])
def test_losses_give_masked_tokens_no_gradient_and_others_a_finite_one(loss: str) -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    objective(
        log_probs=log_probs,
        old=[-1.1, -1.9, -80.0],
        loss={"type": loss},
        offPolicy={"reject": [{"high": 2.0}]},
    ).loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[2] == 0
    assert torch.isfinite(log_probs.grad).all()
    assert (log_probs.grad[:2] != 0).all()


def test_masked_tokens_get_no_gradient() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    objective(log_probs=log_probs).loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.5, 0.5, 0]


def test_an_empty_micro_batch_has_a_zero_loss_with_a_gradient() -> None:
    empty = torch.empty(0)
    log_probs = empty.clone().requires_grad_()
    inputs = LossInputs(empty, empty, empty, empty, torch.empty(0, dtype=torch.int64))
    spec = {
        "estimator": "gspo",
        "offPolicy": {"method": "icepop", "level": "sequence", "opsmDelta": 0.1},
    }
    for algorithm in (Algorithm(), Algorithm.model_validate(spec)):
        result = policy_objective(log_probs, empty, inputs, algorithm)
        result.loss.backward()
        assert result.loss == 0
        assert result.maxima["train_rollout_logprob_abs_diff_max"] == 0


OLD = [-1.5, -1.5, 0.0]  # ratios e^0.5 (A = 1), e^-0.5 (A = -1); the third token is masked
UP, DOWN = math.exp(0.5), math.exp(-0.5)


def test_gspo_takes_the_ratio_of_the_sequence() -> None:
    same_sequence = torch.tensor([0, 0, 0])
    sums = objective(old=OLD, sequence=same_sequence, estimator="gspo").sums
    assert float(sums["pg_loss"]) == pytest.approx(0, abs=1e-7), (
        "the mean of +0.5 and -0.5: both ratios are 1"
    )
    assert float(sums["pg_clipfrac"]) == float(sums["ppo_kl"]) == 0
    apart = objective(old=OLD, estimator="gspo").sums
    assert float(apart["pg_loss"]) == pytest.approx(0.5 * -1.2 + 0.5 * 0.8), (
        "sequences of one token: as grpo"
    )


def test_cispo_weights_log_probs_by_clipped_ratios() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    result = objective(
        old=OLD, log_probs=log_probs, estimator="cispo", loss={"clip": {"low": 1.0, "high": 0.28}}
    )
    result.loss.backward()
    assert float(result.sums["pg_loss"]) == pytest.approx(0.5 * 1.28 * 1.0 - 0.5 * DOWN * 2.0)
    assert float(result.sums["pg_clipfrac"]) == 0.5
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.5 * 1.28, 0.5 * DOWN, 0])


def test_reinforce_has_no_ratio() -> None:
    sums = objective(old=OLD, loss={"type": "reinforce"}).sums
    assert float(sums["pg_loss"]) == pytest.approx(0.5 * 1.0 - 0.5 * 2.0)


def test_the_losses_of_other_estimators_can_be_chosen() -> None:
    chosen = objective(
        old=OLD, estimator="rloo", loss={"type": "gspo"}, sequence=torch.zeros(3, dtype=torch.int64)
    ).sums
    assert float(chosen["ppo_kl"]) == 0


def test_the_engines_log_probs_may_be_the_old_ones() -> None:
    sums = objective(old=OLD, offPolicy={"oldLogProbs": "rollout"}).sums
    # ratios e^0.1 and e^-0.2, both within the clip
    assert float(sums["pg_loss"]) == pytest.approx(-0.5 * math.exp(0.1) + 0.5 * math.exp(-0.2))
    assert float(sums["ppo_kl"]) == pytest.approx(0.5 * -0.1 + 0.5 * 0.2)
    assert float(sums["train_rollout_logprob_abs_diff"]) == pytest.approx((0.4 + 0.3) / 2), (
        "still trainer and engine"
    )


def test_icepop_at_sequence_level_drops_the_whole_sequence() -> None:
    off_policy = {"method": "icepop", "low": 0.9, "high": 2.0, "level": "sequence"}
    sums = objective(offPolicy=off_policy).sums
    # sequence 0: e^0.1 stays; sequence 1: e^-0.2 < 0.9 is dropped
    assert float(sums["pg_loss"]) == pytest.approx(-0.5 * math.exp(0.1))
    assert float(sums["tis_clipfrac"]) == 0.5


def test_opsm_leaves_out_only_sequences_with_negative_advantage() -> None:
    sums = objective(old=OLD, offPolicy={"opsmDelta": 0.1}).sums
    assert float(sums["pg_loss"]) == pytest.approx(0.5 * -1.2), (
        "the second sequence moved by 0.5 and is bad"
    )
    assert float(sums["opsm_clipfrac"]) == 0.5
    assert float(objective(old=OLD, offPolicy={"opsmDelta": 0.6}).sums["opsm_clipfrac"]) == 0


def test_the_dual_clip_has_a_metric() -> None:
    sums = objective(old=[-1.0, -4.0, 0.0], loss={"clip": {"dual": 3.0}}).sums
    assert float(sums["pg_loss"]) == pytest.approx(-0.5 + 0.5 * 3.0), "e^2 = 7.4 is bounded by 3"
    assert float(sums["pg_clipfrac_lower"]) == 0.5


def test_unbiased_kl_with_gspo_uses_the_ratio_of_each_token() -> None:
    kl = {"lossCoef": 0.5, "type": "k1", "unbiased": True}
    options: dict[str, Any] = {
        "estimator": "gspo",
        "sequence": torch.zeros(3, dtype=torch.int64),
        "kl": kl,
    }
    sums = objective(old=OLD, ref=[-2.0, -2.5, 0.0], **options).sums
    assert float(sums["kl_loss"]) == pytest.approx(0.5 * UP * 1.0 + 0.5 * DOWN * 0.5)


def test_a_custom_loss_replaces_the_policy_gradient() -> None:
    def squared(log_probs, entropy, inputs, algorithm):  # type: ignore[no-untyped-def]
        return (log_probs - inputs.rollout_log_probs).square(), {"mine": inputs.advantages}

    sums = objective(custom=squared, entropyCoef=0.1).sums
    assert float(sums["pg_loss"]) == pytest.approx((0.01 + 0.04) / 2)
    assert float(sums["mine"]) == 0
    assert float(sums["loss"] - sums["pg_loss"]) == pytest.approx(-0.15), (
        "entropy and KL terms stay"
    )


ALGORITHMS = [
    {},
    {"loss": {"clip": {"low": 0.2, "high": 0.28, "dual": 3.0}}},
    {"estimator": "gspo"},
    {"estimator": "cispo"},
    {"loss": {"type": "reinforce"}},
    {"entropyCoef": 0.1, "kl": {"lossCoef": 0.3, "type": "low_var_kl", "unbiased": True}},
    {"offPolicy": {"method": "tis", "level": "sequence", "high": 1.1}},
    {
        "offPolicy": {
            "method": "icepop",
            "low": 0.8,
            "high": 1.3,
            "level": "geometric",
            "opsmDelta": 0.05,
        }
    },
    {"offPolicy": {"oldLogProbs": "rollout"}},
]


@pytest.mark.parametrize("spec", ALGORITHMS, ids=str)
def test_gradients_equal_those_of_the_formula(spec: dict[str, object]) -> None:
    """Everything once more, sequence by sequence in double precision, as the papers write it."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> torch.Tensor:
        return torch.rand(12, generator=generator) * (high - low) + low

    sequence = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    mask = (draw(0, 1) > 0.25).float()
    log_probs, old, rollout, ref = (draw(-3, -0.1) for _ in range(4))
    old, rollout = log_probs + (old + 1.5) / 3, log_probs + (rollout + 1.5) / 3
    advantages, entropy = torch.tensor([1.0, -0.7, -2.0])[sequence], draw(0, 2)
    weights = mask / mask.sum()
    algorithm = Algorithm.model_validate(spec)
    inputs = LossInputs(advantages, weights, weights, rollout, sequence, old, ref)
    ours = log_probs.clone().requires_grad_()
    result = policy_objective(ours, entropy, inputs, algorithm)
    result.loss.backward()
    double = log_probs.double().requires_grad_()
    parts = (double, entropy, advantages, old, rollout, ref, mask)
    loss = (
        sum(written(algorithm, *(part[sequence == s] for part in parts)) for s in range(3))
        / mask.sum()
    )
    loss.backward()
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert ours.grad is not None
    assert double.grad is not None
    assert ours.grad.tolist() == pytest.approx(double.grad.tolist(), rel=1e-4, abs=1e-7)


def written(a: Algorithm, logp, entropy, advantage, old, rollout, ref, mask):  # type: ignore[no-untyped-def]
    """Sum over the unmasked tokens of one sequence."""
    n = mask.sum()
    train = old
    if a.off_policy.old_log_probs == "rollout":
        old = rollout
    log_ratio = logp - old
    token_ratio = log_ratio.exp()
    if a.estimator == "gspo":
        log_ratio = ((log_ratio * mask).sum() / n).expand(len(mask))
    ratio = log_ratio.exp()
    clip = a.loss.clip
    low, high = 1 - clip.low, 1 + (clip.low if clip.high is None else clip.high)
    if a.loss.type == "reinforce":
        tokens = -advantage * logp
    elif a.estimator == "cispo":
        tokens = -ratio.clamp(low, high).detach() * advantage * logp
    else:
        tokens = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if clip.dual:
            tokens = torch.where(
                advantage < 0, torch.minimum(tokens, -clip.dual * advantage), tokens
            )
    if a.off_policy.opsm_delta is not None:
        moved = ((old - logp.detach()) * mask).sum() / n
        tokens = tokens * (1 - ((advantage < 0) & (moved > a.off_policy.opsm_delta)).float())
    if a.off_policy.weighted:
        gap = (train - rollout).double()
        gap = {"token": gap, "sequence": (gap * mask).sum(), "geometric": (gap * mask).sum() / n}[
            a.off_policy.level
        ]
        weight = gap.exp()
        inside = (weight >= a.off_policy.low) & (weight <= a.off_policy.high)
        clamped = weight.clamp(a.off_policy.low, a.off_policy.high)
        tokens = tokens * (clamped if a.off_policy.method == "tis" else weight * inside)
    tokens = tokens - a.entropy_coef * entropy
    if a.kl.loss_coef:
        gap = logp - ref
        tokens = tokens + a.kl.loss_coef * (token_ratio * ((-gap).exp() - 1 + gap)).clamp(-10, 10)
    return (tokens * mask).sum()


def test_correction_weights_are_divided_by_their_mean_if_normalized() -> None:
    options = {"method": "tis", "high": 1.0}
    plain = objective(offPolicy=options)
    halved = objective(mean_weight=2.0, offPolicy={**options, "normalize": True})
    assert float(plain.sums["pg_loss"]) != 0
    assert float(halved.sums["pg_loss"]) == pytest.approx(float(plain.sums["pg_loss"]) / 2)
    assert halved.sums["tis"] == plain.sums["tis"], "the metrics are those before"
    assert objective(mean_weight=2.0, offPolicy=options).sums["pg_loss"] == plain.sums["pg_loss"]
