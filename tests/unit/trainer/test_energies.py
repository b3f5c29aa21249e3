"""Energies of tokens, against the gradient that they stand for."""

from __future__ import annotations

import pytest
import torch

from sluice_trainer.step.logits import energies


@pytest.mark.parametrize("scale", [1.0, 1 / 0.7], ids=["as they are", "temperature 0.7"])
def test_an_energy_is_the_squared_norm_of_the_gradient_by_the_scaled_logits(
    scale: float,
) -> None:
    torch.manual_seed(0)
    logits, targets = 4 * torch.randn(5, 11), torch.tensor([0, 3, 10, 3, 7])
    scaled = (logits * scale).requires_grad_()
    log_probs = torch.log_softmax(scaled, -1).gather(-1, targets[:, None]).sum()
    (gradient,) = torch.autograd.grad(log_probs, scaled)
    (values,) = energies(logits, targets, scale=scale)
    assert torch.allclose(values, gradient.square().sum(-1), atol=1e-6)


def test_a_certain_token_has_no_energy_and_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, 0.0, 0.0], [0.0, 3e4, 0.0]])
    (values,) = energies(logits, torch.tensor([0, 0]), scale=1.0)
    assert values.tolist() == pytest.approx([0.0, 2.0])
