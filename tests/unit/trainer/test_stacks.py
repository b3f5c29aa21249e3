"""Stacks of experts are split into parts that fit a bucket; other tensors are not."""

from __future__ import annotations

import pytest
import torch

from sluice.engines.sglang.layout import Layout
from sluice_trainer.weights.buckets import buckets

UP, DOWN = "model.layers.3.mlp.experts.w13_weight", "model.layers.3.mlp.experts.w2_weight"


def split(experts: int, max_bytes: int, name: str = UP) -> list[torch.Tensor]:
    """Split a stack of `experts` times 24 bytes."""
    stack = torch.arange(experts * 6, dtype=torch.float32).view(experts, 2, 3)
    parts = list(Layout().in_parts([(name, stack)], max_bytes))
    assert {name for name, _ in parts} == {name}
    assert torch.equal(torch.cat([part.view(-1, 2, 3) for _, part in parts]), stack)
    return [part for _, part in parts]


@pytest.mark.parametrize(
    ("experts", "max_bytes", "parts"),
    [
        (8, 192, 1),
        (8, 191, 2),
        (8, 96, 2),
        (8, 95, 4),
        (8, 1, 8),
        (6, 70, 3),
        (7, 100, 7),
        (256, 1, 32),
    ],
)
def test_a_stack_has_as_few_equal_parts_as_fit(experts: int, max_bytes: int, parts: int) -> None:
    assert len(split(experts, max_bytes)) == parts


def test_the_shape_of_a_part_tells_its_number() -> None:
    assert [tuple(part.shape) for part in split(8, 48, DOWN)] == [
        (2, 2, 3),
        (1, 2, 2, 3),
        (1, 1, 2, 2, 3),
        (1, 1, 1, 2, 2, 3),
    ]


def test_other_tensors_stay_whole() -> None:
    tensor = torch.zeros(8, 2, 3)
    [(name, part)] = Layout().in_parts([("model.embed_tokens.weight", tensor)], 10)
    assert name == "model.embed_tokens.weight"
    assert part is tensor


def test_buckets_are_almost_full() -> None:
    """Qwen3-30B-A3B's layers with a byte for each MiB.

    Whole stacks would fill buckets only half.
    """
    layers = [f"model.layers.{number}" for number in range(48)]
    sizes = {"self_attn.qkv_proj.weight": 36, "mlp.experts.w13_weight": 768}
    sizes |= {"mlp.experts.w2_weight": 384}
    weights = [
        (f"{layer}.{name}", torch.zeros(128 if "experts" in name else 1, size // 128 or size))
        for layer in layers
        for name, size in sizes.items()
    ]
    as_bytes = [(name, tensor.to(torch.int8)) for name, tensor in weights]
    full = [bucket.data.nbytes / 1024 for bucket in buckets(as_bytes, 1024, Layout())]
    assert min(full[:-1]) > 0.9
    assert sum(full) == pytest.approx(48 * (36 + 768 + 384) / 1024)
