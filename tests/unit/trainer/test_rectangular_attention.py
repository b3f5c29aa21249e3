"""Attention of the last queries of a sequence, joined from a rectangle and a square."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from sluice_trainer.megatron.model.rectangular_attention import attend


def drawn(heads: int, kv_heads: int, queries: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(1, *size, 16, generator=generator).requires_grad_() for size in sizes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 2), (32, 33), (32, 64), (48, 160), (160, 192)])
def test_rectangle_and_square_give_the_attention_of_the_whole(
    heads: int, kv_heads: int, queries: int, keys: int
) -> None:
    query, key, value = tensors = drawn(heads, kv_heads, queries, keys)
    attended = attend(query, key, value, 0.3)
    mask = causal_lower_right(queries, keys)
    all_keys, all_values = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    expected = F.scaled_dot_product_attention(
        query, all_keys, all_values, attn_mask=mask, scale=0.3
    )
    torch.testing.assert_close(attended, expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((attended * weights).sum(), tensors)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), tensors))
