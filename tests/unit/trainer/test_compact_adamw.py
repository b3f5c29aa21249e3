"""AdamW with moments in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sluice_trainer.megatron.step import adamw
from sluice_trainer.megatron.step.adamw import CompactAdamW, rounded, update

BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "PIECE", 1000)
    adamw._places.cache_clear()


def compact(share: Tensor, **options: Any) -> CompactAdamW:
    optimizer = CompactAdamW([share], **options)
    optimizer.param_groups[0].update(BF16)
    return optimizer


def test_a_number_is_rounded_to_a_neighbour_and_is_correct_on_average() -> None:
    exact = torch.tensor([1.0, 1.001, -3.1416, 1e-20, 0.0, float("inf")])
    results = torch.stack([rounded(exact, step) for step in range(4096)]).double()
    assert torch.equal(results.float().bfloat16().double(), results)
    assert [len(set(column.tolist())) for column in results.T] == [1, 2, 2, 2, 1, 1]
    mean = results.mean(0)
    assert torch.allclose(mean[:5], exact[:5].double(), rtol=1e-5)


def test_thresholds_are_evenly_distributed_over_positions() -> None:
    exact = torch.full((1000,), 1.0 + 2**-9)  # a quarter of the way to the next bf16 number
    shares = [(rounded(exact, step) > 1.0).float().mean().item() for step in range(50)]
    assert shares == pytest.approx([0.25] * 50, abs=0.01)


def test_a_mean_of_squares_falls_though_rounding_to_nearest_would_keep_it() -> None:
    weights, gradient = torch.zeros(64), torch.zeros(64)
    first, second = torch.zeros(64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    nearest = torch.ones(64, dtype=torch.bfloat16)
    group = {"betas": (0.9, 0.999), "lr": 0.0, "weight_decay": 0.0, "eps": 1e-8}
    for step in range(1000):
        update(weights, gradient, first, second, float(step), group)
        nearest = (nearest.float() * 0.999).bfloat16()
    assert second.float().mean().item() == pytest.approx(0.999**1000, rel=0.02)
    assert (nearest == 1.0).all()


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_a_model_learns_equally_with_moments_in_half_precision(beta2: float) -> None:
    torch.manual_seed(0)
    inputs, goal = torch.randn(512, 50), torch.randn(50, 41)
    plain, ours = (torch.zeros(50 * 41) for _ in range(2))
    options = {"lr": 3e-3, "betas": (0.9, beta2), "weight_decay": 0.01}
    usual = torch.optim.AdamW([plain], **options)  # type: ignore[arg-type]
    stored = compact(ours, **options)
    losses = {}
    for step in range(300):
        rows = torch.randint(0, 512, (64,))
        for optimizer, share in ((usual, plain), (stored, ours)):
            error = inputs[rows] @ (share.view(50, 41) - goal)
            share.grad = (inputs[rows].t() @ error / 64).flatten()
            optimizer.step()
            losses[optimizer] = error.square().mean().item()
        assert losses[stored] == pytest.approx(losses[usual], rel=0.02, abs=1e-3), step
    assert losses[usual] < 20  # 50 at first
    assert (ours - plain).norm() < 0.01 * plain.norm()
    kinds = {name: stored.state[ours][name].dtype for name in adamw.MOMENTS}
    assert set(kinds.values()) == {torch.bfloat16}
