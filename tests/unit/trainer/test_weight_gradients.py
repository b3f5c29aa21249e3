"""Weight gradients that a matrix product adds to their sum."""

from __future__ import annotations

import pytest
import torch

from sluice_trainer.megatron.fused_operations import add_weight_gradient


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "times_better"),
    [pytest.param(torch.float32, 0.5, id="fp32"), pytest.param(torch.bfloat16, 1e3, id="bf16")],
)
def test_micro_batches_are_summed_without_rounding_in_between(
    dtype: torch.dtype, times_better: float
) -> None:
    torch.manual_seed(0)
    batches = [(drawn(64, 24).to(dtype), drawn(64, 16).to(dtype)) for _ in range(8)]
    total, apart = torch.zeros(16, 24), torch.zeros(16, 24)
    for inputs, gradients in batches:
        add_weight_gradient(inputs, gradients, total)
        apart += gradients.t() @ inputs  # torch's way
    products = [gradients.double().t() @ inputs.double() for inputs, gradients in batches]
    exact = torch.stack(products).sum(0)
    error, usual = ((result - exact).norm() / exact.norm() for result in (total, apart))
    assert error < 1e-6
    assert usual / error > times_better
