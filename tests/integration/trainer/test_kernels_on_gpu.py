"""The trainer's kernels in bf16 and at real sizes, compared with torch's functions in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_trainer.kernels import compact_adamw, feed_forward
from sluice_trainer.megatron.step import adamw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda")


def outcome(
    function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Return the result and its gradients."""
    leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    grad = draw(*result.shape).to(dtype)
    return [result, *torch.autograd.grad(result, leaves, grad)]


@pytest.mark.parametrize("width", [768, 9728, 100])
@pytest.mark.parametrize("weighted", [True, False])
def test_gated_rows_and_their_gradients(width: int, weighted: bool) -> None:
    inputs = [draw(1000, 2 * width), *([draw(1000).sigmoid()] if weighted else [])]

    def plain(up: Tensor, weights: Tensor | None = None) -> Tensor:
        rows = F.silu(up[:, :width]) * up[:, width:]
        return rows if weights is None else rows * weights[:, None]

    def ours(up: Tensor, weights: Tensor | None = None) -> Tensor:
        return feed_forward.gated(up, weights)

    pairs = zip(
        outcome(ours, inputs, torch.bfloat16), outcome(plain, inputs, torch.float32), strict=True
    )
    assert all((a.float() - b).norm() / b.norm() < 0.01 for a, b in pairs)


def test_sums_of_rows() -> None:
    rows = draw(5000, 2048).bfloat16()
    places = torch.randint(0, 5001, (700, 8), device="cuda")
    padded = torch.cat([rows.float(), rows.new_zeros(1, 2048).float()])
    expected = padded[places].sum(1)
    assert (feed_forward.sums(rows, places).float() - expected).abs().max() < 0.05


def test_moments_in_bf16_are_rounded_by_the_same_thresholds() -> None:
    count = adamw.PIECE + 12345
    group = {"betas": (0.9, 0.95), "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
    gradient = draw(count)
    moments = [draw(count).bfloat16(), draw(count).abs().bfloat16()]
    ours = [draw(count), *(moment.clone() for moment in moments)]
    theirs = [draw(count), *(moment.clone() for moment in moments)]
    for step in range(3):
        compact_adamw.update(
            *(ours[0], gradient, (ours[1], ours[2]), step, group),
            piece=adamw.PIECE,
            golden=adamw._GOLDEN,
            offset=adamw._offset(step),
        )
        for place in adamw.pieces(count):
            weights, first, second = (tensor[place] for tensor in theirs)
            adamw.update(weights, gradient[place], first, second, float(step), group)
    for a, b in zip(ours, theirs, strict=True):
        differ = (a.float() - b.float()).abs() > 1e-4 * b.float().abs() + 1e-5
        assert differ.float().mean() < 0.01  # at a threshold the order of operations matters
