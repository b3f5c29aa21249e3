"""The form in which SGLang takes tensors: all experts of a layer in one stack.

Stacks need sluice's plugin in the engine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from sluice.api import RLJobSpec
from sluice.engines.protocol import ADAPTER_PREFIX

T = TypeVar("T", bound=Any)
# Suffixes of SGLang's names of stacks, in every family that can be trained: gate above up, and
# down.
STACKS = (".experts.w13_weight", ".experts.w2_weight")
_ADAPTED_LAYER = re.compile(rf"{re.escape(ADAPTER_PREFIX)}.*?\.layers\.\d+\.")
# torch's kernels support 64 dimensions.
_MOST_PARTS = 32


def _unit(name: str) -> str:
    """Return the name of what has to come in one bucket; empty for a tensor that may come alone."""
    if layer := _ADAPTED_LAYER.match(name):
        return layer[0]
    before, attention, _ = name.partition(".self_attn.")
    return before + attention if attention else ""


class Layout:
    """The layout of SGLang."""

    untied = ("qwen3_moe", "glm4_moe")

    def takes_stacks(self, spec: RLJobSpec) -> bool:
        return spec.weight_sync.engine_plugin and spec.rollout.precision == "bf16"

    def stack_name(self, experts: str, *, gated: bool) -> str:
        return f"{experts}.{'w13' if gated else 'w2'}_weight"

    def inseparable(self, tensors: Iterable[tuple[str, T]]) -> Iterator[list[tuple[str, T]]]:
        """Yield the tensors of an attention layer together, all others alone.

        SGLang joins DeepSeek's q_a_proj and kv_a_proj_with_mqa, and loses one of them if the other
        comes in another bucket. It also joins adapters, so those of a decoder layer come together.
        """
        for unit, group in itertools.groupby(tensors, lambda named: _unit(named[0])):
            if unit:
                yield list(group)
            else:
                yield from ([named] for named in group)

    def in_parts(self, tensors: Iterable[tuple[str, T]], max_bytes: int) -> Iterator[tuple[str, T]]:
        """Yield the tensors, with stacks larger than `max_bytes` in parts that a bucket can hold.

        The parts have equal numbers of experts. SGLang tells a loader the tensor and no more, so
        the tensor says which part it is: part i of [experts, m, n] has i more dimensions of size 1
        in front. The larger stack of a layer of DeepSeek-V3 has 15 GB, for which no engine has
        memory.
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
