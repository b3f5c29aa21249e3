"""Tensors as SGLang wants them: all experts of a layer in one stack, which needs our
plugin in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from sluice.api import RLJobSpec

T = TypeVar("T", bound=Any)
STACKS = (".experts.w13_weight", ".experts.w2_weight")
"""Ends of SGLang's names of them, in every family that we train: gate above up, and down."""
_MOST_PARTS = 32
"""torch's kernels know 64 dimensions."""


class Layout:
    """SGLang's."""

    untied = ("qwen3_moe", "glm4_moe")

    def takes_stacks(self, spec: RLJobSpec) -> bool:
        return spec.weight_sync.engine_plugin

    def stack_name(self, experts: str, *, gated: bool) -> str:
        return f"{experts}.{'w13' if gated else 'w2'}_weight"

    def inseparable(self, tensors: Iterable[tuple[str, T]]) -> Iterator[list[tuple[str, T]]]:
        """The tensors of an attention layer together, all others each by itself.

        SGLang joins DeepSeek's q_a_proj and kv_a_proj_with_mqa, and forgets the one whose other
        comes in another bucket.
        """
        together: list[tuple[str, T]] = []
        for name, tensor in tensors:
            layer, attention, _ = name.partition(".self_attn.")
            if together and not (attention and together[0][0].startswith(layer + attention)):
                yield together
                together = []
            together.append((name, tensor))
        if together:
            yield together

    def in_parts(self, tensors: Iterable[tuple[str, T]], max_bytes: int) -> Iterator[tuple[str, T]]:
        """The same, but stacks larger than `max_bytes` in parts of equal numbers of experts: what a
        bucket can hold.

        A loader in SGLang is told a tensor and no more, so the tensor says which part it is: part i
        of [experts, m, n] has i more dimensions, of size 1, in front. A layer's larger stack of
        DeepSeek-V3 has 15 GB: no engine has room for it.
        """
        for name, tensor in tensors:
            if not name.endswith(STACKS):
                yield name, tensor
                continue
            possible = [count for count in range(1, _MOST_PARTS + 1) if len(tensor) % count == 0]
            parts = next(
                (count for count in possible if tensor.nbytes <= count * max_bytes), possible[-1]
            )
            for number, part in enumerate(tensor.chunk(parts)):
                yield name, part.reshape((1,) * number + part.shape)
