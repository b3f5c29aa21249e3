"""The layout of engines that take tensors one by one, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from sluice.api import RLJobSpec

T = TypeVar("T")


class SingleTensors:
    """A layout without tensors that must be joined, split or come together.

    Parameters
    ----------
    untied
        The `model_type` of families whose embedding is never the engine's output layer.

    """

    def __init__(self, untied: Sequence[str] = ()) -> None:
        self.untied = untied

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
