"""Buckets hold the tensors' own bytes, whatever their types and sizes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engines.sglang.layout import Layout
from sluice_trainer.weights.buckets import buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.bool]
Tensors = list[tuple[str, torch.Tensor]]


@st.composite
def tensors(draw: st.DrawFn) -> Tensors:
    weights = []
    for number in range(draw(st.integers(1, 8))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 - 3
        transposed = values.t() if len(shape) == 2 else values  # not contiguous
        weights.append((f"layer.{number}.weight", transposed.to(draw(st.sampled_from(DTYPES)))))
    return weights


@settings(deadline=None)
@given(tensors(), st.integers(1, 600))
def test_buckets_give_back_the_tensors_in_order(weights: Tensors, limit: int) -> None:
    filled = list(buckets(weights, limit, Layout()))
    back = [pair for bucket in filled for pair in bucket.tensors()]
    assert [name for name, _ in back] == [name for name, _ in weights]
    for (_, actual), (_, expected) in zip(back, weights, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@settings(deadline=None)
@given(tensors(), st.integers(1, 600))
def test_only_a_tensor_that_is_larger_than_the_limit_makes_a_larger_bucket(
    weights: Tensors, limit: int
) -> None:
    filled = list(buckets(weights, limit, Layout()))
    assert [bucket.last for bucket in filled] == [False] * (len(filled) - 1) + [True]
    for bucket in filled:
        assert bucket.data.dtype == torch.uint8
        assert bucket.data.nbytes == sum(t.nbytes for _, t in bucket.tensors())
        assert bucket.data.nbytes <= limit or sum(1 for _, t in bucket.tensors() if t.nbytes) == 1


def test_a_bucket_names_its_tensors_types_and_shapes() -> None:
    [bucket] = buckets(
        [("a", torch.ones(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros(()))], 100, Layout()
    )
    assert (bucket.names, bucket.dtypes, bucket.shapes) == (
        ("a", "b"),
        ("bfloat16", "float32"),
        ((2, 3), ()),
    )


def test_a_model_without_tensors_still_ends() -> None:
    [bucket] = buckets([], 100, Layout())
    assert (bucket.names, bucket.data.nbytes, bucket.last) == ((), 0, True)


def test_tensors_that_sglang_fuses_come_in_one_bucket() -> None:
    """SGLang drops DeepSeek's q_a_proj if a bucket ends before kv_a_proj_with_mqa."""
    names = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    attention = [
        [f"model.layers.{layer}.self_attn.{name}.weight" for name in names] for layer in range(2)
    ]
    ends = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]
    weights = [
        (name, torch.ones(10)) for layer in range(2) for name in [*attention[layer], ends[layer]]
    ]
    contents = [list(bucket.names) for bucket in buckets(weights, 100, Layout())]
    assert contents == [attention[0], [ends[0]], attention[1], [ends[1]]]
