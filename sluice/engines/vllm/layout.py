"""Tensors as vLLM wants them: by the names of a Hugging Face checkpoint, one by one.

An update goes through vLLM's layerwise reload, which keeps what a layer has until it has all of it,
so nothing has to come in one bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from sluice.api import RLJobSpec

T = TypeVar("T")


class Layout:
    """vLLM's."""

    untied = ("deepseek_v3", "glm4_moe")

    def takes_stacks(self, spec: RLJobSpec) -> bool:
        return False

    def stack_name(self, experts: str, *, gated: bool) -> str:
        raise NotImplementedError("vLLM takes experts one by one")

    def inseparable(self, tensors: Iterable[tuple[str, T]]) -> Iterator[list[tuple[str, T]]]:
        """Each by itself."""
        return ([one] for one in tensors)

    def in_parts(self, tensors: Iterable[tuple[str, T]], max_bytes: int) -> Iterator[tuple[str, T]]:
        """The tensors as they are: a bucket has at least one, however large."""
        return iter(tensors)
