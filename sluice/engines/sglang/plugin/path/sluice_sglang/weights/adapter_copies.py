"""Copies an adapter's tensors to their places in SGLang's memory, all at once.

SGLang joins, cuts and copies each tensor separately in Python, which takes longer than their
transfer. The places do not change, so they are looked up once: SGLang itself says, by cutting the
numbers of rows and columns in place of weights, which of them a rank holds. The result is used only
if it agrees with what SGLang has loaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# SGLang's layers that several of transformers' make up, in the order of their outputs.
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a tensor, and the memory that it belongs to.

    name: the tensor's name in PEFT. rows, columns: the part. target: a view of SGLang's memory.
    """

    name: str
    rows: slice
    columns: slice
    target: torch.Tensor

    def part(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors[self.name][self.rows, self.columns]


class Copies:
    """The places of all tensors of an adapter in one slot of SGLang's memory."""

    def __init__(self, manager: Any, tensors: Mapping[str, torch.Tensor], slot: int) -> None:
        self.slot = slot
        self.places = list(_places(manager, tensors, slot))

    def agree(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return True if the places are known for all tensors and hold them."""
        names = {place.name for place in self.places}
        return names == tensors.keys() and all(
            torch.equal(place.target, place.part(tensors).to(place.target)) for place in self.places
        )

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of the same names and shapes."""
        places = [place for place in self.places if place.name in tensors]
        torch._foreach_copy_(
            [place.target for place in places], [place.part(tensors) for place in places]
        )


def _places(manager: Any, tensors: Mapping[str, torch.Tensor], slot: int) -> Iterator[Place]:
    from sglang.srt.lora.utils import get_target_module_name

    pool = manager.memory_pool
    by_layer = {name.partition(".layers.")[2]: name for name in tensors}
    for number, modules in enumerate(manager.lora_modules):
        for path, module in modules.items():
            names = _names(path, by_layer)
            if not names:
                continue
            kind = get_target_module_name(path, pool.target_modules)
            a, b = pool.A_buffer[kind][number][slot], pool.B_buffer[kind][number][slot]
            yield from _places_of_a(module, [n for n, _ in names], tensors, a)
            yield from _places_of_b(module, [n for _, n in names], tensors, b)


def _names(path: str, by_layer: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the names of A and B of the layers that make up one of SGLang's.

    Empty unless all of them have an adapter.
    """
    parent, _, leaf = path.rpartition(".layers.")[2].rpartition(".")
    layers = [f"{parent}.{part}" for part in JOINED.get(leaf, (leaf,))]
    names = [(f"{layer}.lora_A.weight", f"{layer}.lora_B.weight") for layer in layers]
    if not all(a in by_layer and b in by_layer for a, b in names):
        return []
    return [(by_layer[a], by_layer[b]) for a, b in names]


def _places_of_a(
    module: Any, names: list[str], tensors: Mapping[str, torch.Tensor], memory: torch.Tensor
) -> Iterator[Place]:
    """Yield the places of matrices A, [rank, in], which are stacked; a rank has some columns."""
    inputs = tensors[names[0]].shape[1]
    columns = module.slice_lora_a_weights(torch.arange(inputs)[None])[0].tolist()
    first = 0
    for name in names:
        rank = tensors[name].shape[0]
        for part, start in _runs(columns):
            target = memory[first : first + rank, start : start + part.stop - part.start]
            yield Place(name, slice(None), part, target)
        first += rank


def _places_of_b(
    module: Any, names: list[str], tensors: Mapping[str, torch.Tensor], memory: torch.Tensor
) -> Iterator[Place]:
    """Yield the places of matrices B, [out, rank], which are stacked; a rank has some rows."""
    heights = [tensors[name].shape[0] for name in names]
    rows = module.slice_lora_b_weights(torch.arange(sum(heights))[:, None])[:, 0].tolist()
    rank, offset = tensors[names[0]].shape[1], 0
    owned = list[tuple[str, slice, int]]()
    for name, height in zip(names, heights, strict=True):
        local = [row - offset if offset <= row < offset + height else -1 for row in rows]
        owned += [(name, part, start) for part, start in _runs(local)]
        offset += height
    for name, part, start in owned:
        target = memory[start : start + part.stop - part.start, :rank]
        yield Place(name, part, slice(None), target)


def _runs(numbers: list[int]) -> Iterator[tuple[slice, int]]:
    """Yield runs of consecutive numbers and their positions; negative numbers are left out."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end < len(numbers) and numbers[end] == numbers[end - 1] + 1 and numbers[end - 1] >= 0:
            continue
        if numbers[start] >= 0:
            yield slice(numbers[start], numbers[end - 1] + 1), start
        start = end
