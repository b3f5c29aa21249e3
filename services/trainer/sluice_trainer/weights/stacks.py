"""Stacks of experts on their way to SGLang, which loads one with our plugin in it (sluice_rollout/sglang_plugin)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

STACKS = (".experts.w13_weight", ".experts.w2_weight")
"""How SGLang's names of them end."""
_MOST_PARTS = 32
"""torch's kernels know 64 dimensions."""


def in_parts(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """The same, but stacks larger than `max_bytes` in parts of equal numbers of experts: what a bucket can hold.

    A loader in SGLang is told a tensor and no more, so the tensor says which part it is: part i of [experts, m, n] has
    i more dimensions, of size 1, in front. A layer's larger stack of DeepSeek-V3 has 15 GB: no engine has room for it.
    """
    for name, tensor in tensors:
        if not name.endswith(STACKS):
            yield name, tensor
            continue
        possible = [count for count in range(1, _MOST_PARTS + 1) if len(tensor) % count == 0]
        parts = next((count for count in possible if tensor.nbytes <= count * max_bytes), possible[-1])
        for number, part in enumerate(tensor.chunk(parts)):
            yield name, part.reshape((1,) * number + part.shape)
