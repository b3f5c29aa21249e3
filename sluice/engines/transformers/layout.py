"""The form in which the engine takes tensors: one by one, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from sluice.api import RLJobSpec

T = TypeVar("T")


class Layout:
    """The layout of transformers."""

    untied: tuple[str, ...] = ()

    def takes_stacks(self, spec: RLJobSpec) -> bool:
        return False

    def stack_name(self, experts: str, *, gated: bool) -> str:
        raise NotImplementedError("the engine takes experts one by one")

    def inseparable(self, tensors: Iterable[tuple[str, T]]) -> Iterator[list[tuple[str, T]]]:
        """Yield each tensor alone."""
        return ([tensor] for tensor in tensors)

    def in_parts(self, tensors: Iterable[tuple[str, T]], max_bytes: int) -> Iterator[tuple[str, T]]:
        """Return the tensors as they are: a bucket has at least one, however large."""
        return iter(tensors)
