"""Hand-computed values of the clipped surrogate and the off-policy corrections."""

from __future__ import annotations

import math

import pytest
import torch

from sluice_trainer.algorithms.policy_loss import (
    cispo_loss,
    clipped_surrogate,
    correction_ratio,
    dppo_loss,
    geo_mean_loss,
    normalize_weights,
    off_policy_correction,
    opsm_mask,
    reinforce_loss,
    sapo_loss,
    sequence_log_ratio,
    weight_sums,
)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.5, 2.0, -2.56, 1),  # 1 + high = 1.28
        (0.5, 2.0, -1.0, 0),  # the pessimistic term is the unclipped one
        (1.5, -2.0, 3.0, 0),
        (0.5, -2.0, 1.6, 1),  # 1 - low = 0.8
        (1.28, 2.0, -2.56, 0),
    ],
    ids=[
        "on policy",
        "above, positive",
        "below, positive",
        "above, negative",
        "below, negative",
        "at the bound",
    ],
)
def test_the_surrogate_is_clipped_on_the_pessimistic_side(
    ratio: float, advantage: float, loss: float, clipped: int
) -> None:
    result = clipped_surrogate(torch.tensor([ratio]), torch.tensor([advantage]), low=0.2, high=0.28)
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() == clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (10.0, -1.0, 3.0),  # without the dual clip: 10
        (2.0, -1.0, 2.0),
        (10.0, 1.0, -1.2),  # positive advantages are not touched
        (0.1, -1.0, 0.8),
    ],
    ids=["bounded", "within the bound", "positive", "clipped below"],
)
def test_dual_clip_bounds_negative_advantages_only(
    ratio: float, advantage: float, loss: float
) -> None:
    result = clipped_surrogate(
        torch.tensor([ratio]), torch.tensor([advantage]), low=0.2, high=0.2, dual=3.0
    )
    assert result.loss.item() == pytest.approx(loss)


def test_a_clipped_token_has_no_gradient() -> None:
    ratio = torch.tensor([1.5, 1.1], requires_grad=True)
    clipped_surrogate(ratio, torch.tensor([1.0, 1.0]), low=0.2, high=0.2).loss.sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0, -1]


def test_tokens_bounded_by_the_dual_clip_are_marked() -> None:
    ratio, advantages = torch.tensor([10.0, 2.0, 10.0]), torch.tensor([-1.0, -1.0, 1.0])
    result = clipped_surrogate(ratio, advantages, low=0.2, high=0.2, dual=3.0)
    assert result.dual_clipped is not None
    assert result.dual_clipped.tolist() == [1, 0, 0]
    assert clipped_surrogate(ratio, advantages, low=0.2, high=0.2).dual_clipped is None


def test_a_token_beyond_the_dual_clip_has_no_gradient() -> None:
    ratio = torch.tensor([10.0, 2.0], requires_grad=True)
    clipped_surrogate(
        ratio, torch.tensor([-1.0, -1.0]), low=0.2, high=0.2, dual=3.0
    ).loss.sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ratio", "weight", "clipped"),
    [(1.0, 1.0, 0), (1.5, 1.28, 1), (0.5, 0.8, 1), (1.28, 1.28, 0), (0.0, 0.8, 1)],
    ids=["on policy", "above", "below", "at the bound", "impossible"],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_clips_the_weight_and_keeps_every_gradient(
    ratio: float, weight: float, clipped: int, advantage: float
) -> None:
    log_probs = torch.tensor([-1.5], requires_grad=True)
    result = cispo_loss(
        log_probs, torch.tensor([ratio]), torch.tensor([advantage]), low=0.2, high=0.28
    )
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(weight * advantage * 1.5)
    assert result.clipped.item() == clipped
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(-weight * advantage)


def test_cispo_takes_no_gradient_through_the_ratio() -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)
    ratio = torch.exp(log_probs - torch.tensor([-1.1]))
    cispo_loss(log_probs, ratio, torch.tensor([1.0]), low=0.2, high=0.28).loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(-math.exp(0.1))


def test_reinforce_weights_log_probs_by_advantages() -> None:
    result = reinforce_loss(torch.tensor([-2.0, -3.0]), torch.tensor([1.0, -0.5]))
    assert result.loss.tolist() == [2, -1.5]
    assert result.clipped.tolist() == [0, 0]


# Two sequences of 2 and 3 tokens; the second has one masked token, whose ratio is absurd.
MASK = torch.tensor([1, 1, 1, 0, 1])
SEQUENCE = torch.tensor([0, 0, 1, 1, 1])
LOG_RATIO = torch.tensor([0.1, 0.3, -0.2, 99.0, -0.4])


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens() -> None:
    log_ratios = sequence_log_ratio(LOG_RATIO, MASK, SEQUENCE)
    assert log_ratios.tolist() == pytest.approx([0.2, 0.2, -0.3, -0.3, -0.3])


def test_the_gspo_gradient_is_the_same_through_the_mean_and_through_each_token() -> None:
    """slime differentiates the mean, verl each token; with equal advantages they are the same."""
    advantages, weights = (
        torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]),
        torch.tensor([0.5, 0.5, 0.5, 0.0, 0.5]) / 2,
    )
    gradients = []
    for per_token in (False, True):
        log_probs = (LOG_RATIO - 2.0).requires_grad_()
        log_ratio = sequence_log_ratio(log_probs + 2.0, MASK, SEQUENCE)
        if per_token:
            log_ratio = log_probs - log_probs.detach() + log_ratio.detach()
        loss = clipped_surrogate(log_ratio.exp(), advantages, low=0.5, high=0.5).loss
        (torch.where(weights > 0, weights * loss, 0.0)).sum().backward()
        gradients.append(log_probs.grad)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert gradients[0].tolist() == pytest.approx(gradients[1].tolist())


@pytest.mark.parametrize(
    ("advantage", "first", "second"),
    [
        # clipped to [-0.3, 0.2] on the pessimistic side: above for A > 0, below for A < 0
        (2.0, math.exp((0.1 + 0.2) / 2), math.exp((-0.2 - 0.4) / 2)),
        (-2.0, math.exp((0.1 + 0.3) / 2), math.exp((-0.2 - 0.3) / 2)),
    ],
    ids=["positive", "negative"],
)
def test_geo_mean_clips_each_token_before_the_mean(
    advantage: float, first: float, second: float
) -> None:
    result = geo_mean_loss(
        LOG_RATIO, torch.full((5,), advantage), MASK, SEQUENCE, low=0.3, high=0.2
    )
    expected = [-advantage * ratio for ratio in (first, first, second, second, second)]
    assert result.loss.tolist() == pytest.approx(expected)
    assert result.clipped[MASK > 0].tolist() == ([0, 1, 0, 0] if advantage > 0 else [0, 0, 0, 1])


def test_geo_mean_shares_its_gradient_among_the_tokens_that_were_not_clipped() -> None:
    log_ratio = torch.tensor([0.1, 0.9, 9.0], requires_grad=True)
    mask, sequence = torch.tensor([1, 1, 0]), torch.zeros(3, dtype=torch.int64)
    loss = geo_mean_loss(log_ratio, torch.ones(3), mask, sequence, low=0.4, high=0.4).loss
    (loss * mask / 2).sum().backward()  # mean of the sequence
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([-math.exp(0.25) / 2, 0, 0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 3.0, -6.0, -3.0),  # 2 / t * A, and the slope of the unclipped surrogate
        (1.0, -3.0, 6.0 / 2, 3.0),
        (1.5, 3.0, -3 * 4 / (1 + math.exp(-0.5)), -3 / math.cosh(0.25) ** 2),
        (1.5, -3.0, 3 * 2 / (1 + math.exp(-1.0)), 3 / math.cosh(0.5) ** 2),
    ],
    ids=["on policy, positive", "on policy, negative", "above, positive", "above, negative"],
)
def test_sapo_gates_the_ratio(ratio: float, advantage: float, loss: float, slope: float) -> None:
    ratios = torch.tensor([ratio], requires_grad=True)
    result = sapo_loss(ratios, torch.tensor([advantage]), positive=1.0, negative=2.0)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss)
    assert ratios.grad is not None
    assert ratios.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moved", "outside"),
    [
        (1.5, 1.0, 0.3, 1),
        (1.5, 1.0, 0.2, 0),  # the bound belongs to the region
        (0.5, 1.0, 0.9, 0),  # it comes back
        (0.5, -1.0, 0.2, 1),  # its own lower bound, 0.1
        (1.5, -1.0, 0.9, 0),
    ],
    ids=["too far up", "at the bound", "moving back up", "too far down", "moving back down"],
)
def test_dppo_leaves_out_tokens_that_moved_too_far_away(
    ratio: float, advantage: float, moved: float, outside: int
) -> None:
    log_probs = torch.tensor([-1.5], requires_grad=True)
    result = dppo_loss(
        log_probs,
        torch.tensor([ratio]),
        torch.tensor([advantage]),
        torch.tensor([moved]),
        low=0.1,
        high=0.2,
        most=1.2,
    )
    result.loss.sum().backward()
    assert result.clipped.item() == outside
    weight = 0.0 if outside else min(ratio, 1.2)
    assert result.loss.item() == pytest.approx(weight * advantage * 1.5)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(-weight * advantage)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.1, 0.3, -0.2, None, -0.4]),
        ("sequence", [0.4, 0.4, -0.6, -0.6, -0.6]),
        ("geometric", [0.2, 0.2, -0.3, -0.3, -0.3]),
    ],
    ids=["token", "sequence", "geometric"],
)
def test_the_ratio_is_of_a_token_or_of_its_sequence(
    level: str, expected: list[float | None]
) -> None:
    ratios = correction_ratio(LOG_RATIO, level, MASK, SEQUENCE).tolist()  # type: ignore[arg-type]
    unmasked = [
        (value, math.exp(log))
        for value, log in zip(ratios, expected, strict=True)
        if log is not None
    ]
    assert [value for value, _ in unmasked] == pytest.approx([value for _, value in unmasked])


def test_the_ratio_of_a_long_sequence_stays_finite() -> None:
    tokens = torch.full((1000,), 5.0)
    ratios = correction_ratio(
        tokens, "sequence", torch.ones(1000), torch.zeros(1000, dtype=torch.int64)
    )
    assert torch.isfinite(ratios).all()


def test_opsm_drops_bad_sequences_from_which_the_policy_has_moved_away() -> None:
    log_ratio = torch.tensor(
        [-0.3, -0.1, -0.3, 99.0, -0.1]
    )  # mean(log old - log new) is 0.2 in both sequences
    bad, good = torch.full((5,), -1.0), torch.ones(5)
    assert opsm_mask(log_ratio, bad, MASK, SEQUENCE, delta=0.1).tolist() == [1, 1, 1, 1, 1]
    assert opsm_mask(log_ratio, bad, MASK, SEQUENCE, delta=0.3).tolist() == [0] * 5
    assert opsm_mask(log_ratio, good, MASK, SEQUENCE, delta=0.1).tolist() == [0] * 5
    assert opsm_mask(-log_ratio, bad, MASK, SEQUENCE, delta=0.0).tolist() == [0] * 5


RATIOS = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])


def correction(method: str) -> list[list[float]]:
    result = off_policy_correction(RATIOS, method, low=0.5, high=2.0)  # type: ignore[arg-type]
    assert result.ratio.tolist() == RATIOS.tolist()
    return [result.weight.tolist(), result.truncated.tolist()]


def test_tis_truncates() -> None:
    assert correction("tis") == [[0.5, 0.5, 1, 2, 2], [1, 0, 0, 0, 1]]


def test_icepop_drops_ratios_outside_the_bounds() -> None:
    assert correction("icepop") == [[0, 0.5, 1, 2, 0], [1, 0, 0, 0, 1]]


def test_the_correction_has_no_gradient() -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)
    ratio = correction_ratio(
        log_probs - math.log(0.5), "token", torch.ones(1), torch.zeros(1, dtype=torch.int64)
    )
    assert not off_policy_correction(ratio, "tis", low=0, high=2).weight.requires_grad


SHARED = torch.tensor([0, 0, 0, 1, 2])
TRAINED = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("level", "total", "count"),
    [("token", 2.0 + 2.0 + 0.5, 3), ("sequence", 2.0 + 0.5, 2), ("geometric", 2.0 + 0.5, 2)],
    ids=["token", "sequence", "geometric"],
)
def test_weights_have_their_mean_over_tokens_or_over_sequences(
    level: str, total: float, count: int
) -> None:
    """Masked tokens, and a sequence without a trained one, do not count."""
    weight = torch.tensor([2.0, 2.0, 2.0, 0.5, 9.0])
    sums = weight_sums(weight, level, TRAINED, SHARED)  # type: ignore[arg-type]
    assert [float(value) for value in sums] == pytest.approx([total, count])


def test_sums_of_weights_of_no_tokens_are_zero() -> None:
    empty = torch.empty(0)
    assert [float(v) for v in weight_sums(empty, "sequence", empty, empty.long())] == [0, 0]
    assert [
        float(v) for v in weight_sums(torch.ones(2), "token", torch.zeros(2), torch.zeros(2).long())
    ] == [0, 0]


def test_normalized_weights_are_one_on_average() -> None:
    """verl's example: weights 2, 0.5, 1 and 0.25 have the mean 0.9375."""
    weight = torch.tensor([2.0, 0.5, 1.0, 0.25])
    weights = normalize_weights(weight, 0.9375)
    assert weights.tolist() == pytest.approx([2.1333333, 0.5333333, 1.0666667, 0.2666667])
    assert float(weights.mean()) == pytest.approx(1)
    assert normalize_weights(torch.zeros(2), 0.0).tolist() == [0, 0], (
        "icepop may have dropped everything"
    )
