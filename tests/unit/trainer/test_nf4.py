"""NF4: the levels of the paper, the nearest one for each weight, and a pass that keeps no copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sluice_trainer.fsdp.nf4 import BLOCK, LEVELS, NF4Linear, dequantized, packed


def test_levels_are_the_quantiles_of_the_paper() -> None:
    """Appendix E: eight quantiles above 0, seven below, and 0, scaled to [-1, 1]."""
    offset, normal = 0.9677083, torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    levels = torch.cat((above, torch.zeros(1), below)).sort().values
    assert torch.allclose(levels / levels.max(), torch.tensor(LEVELS), atol=1e-6)


def nearest(weight: Tensor) -> Tensor:
    """Return a weight with every number replaced by the nearest level times its block's scale."""
    blocks = weight.float().reshape(-1, BLOCK)
    choices = torch.tensor(LEVELS) * blocks.abs().amax(1, keepdim=True)
    chosen = (blocks[:, :, None] - choices[:, None]).abs().argmin(-1)
    return choices.gather(1, chosen).view(weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_becomes_the_nearest_levels(dtype: torch.dtype) -> None:
    weight = torch.randn(7, 3 * BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[2, :BLOCK] = 0
    assert torch.allclose(dequantized(packed(weight), torch.float32), nearest(weight), atol=1e-7)


def test_a_weight_takes_four_and_a_half_bits() -> None:
    assert packed(torch.zeros(5, 128)).nbytes * 8 == 4.5 * 5 * 128


def test_a_layer_computes_with_the_dequantized_weight() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(128, 6), torch.randn(4, 128, requires_grad=True)
    layer.requires_grad_(False)
    quantized = NF4Linear(layer)
    layer.weight.copy_(nearest(layer.weight))
    results = []
    for module in (layer, quantized):
        output = module(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        results.append((output, gradient))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert [name for name, _ in quantized.named_parameters()] == ["bias"]
