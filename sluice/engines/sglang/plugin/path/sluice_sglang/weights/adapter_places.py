"""The places of an adapter's tensors in SGLang's memory, to which they are copied all at once.

SGLang joins, cuts and copies each tensor separately in Python, which takes longer than their
transfer. The places depend on the shapes alone, so they are looked up once: SGLang itself says, by
cutting the numbers of rows and columns in place of weights, which of them a rank holds. They are
used once they have been seen to agree with what SGLang loads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .parameter_places import runs

# SGLang's layers that several of transformers' make up, in the order of their outputs.
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    # Layers with a recurrent state (gated delta nets).
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
WHOLE = slice(None)
Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a tensor, and the memory that it belongs to.

    name: the tensor's name in PEFT. rows, columns: the part of the tensor. memory: SGLang's memory
    of all slots, [slots, rows, columns]. target_rows, target_columns: the part's place in a slot.
    """

    name: str
    rows: slice
    columns: slice
    memory: torch.Tensor
    target_rows: slice
    target_columns: slice

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = self.rows == WHOLE and self.columns == WHOLE
        return tensor if whole else tensor[self.rows, self.columns]

    def target(self, slot: int) -> torch.Tensor:
        return self.memory[slot, self.target_rows, self.target_columns]


@dataclass(slots=True)
class Places:
    """The places of all tensors of adapters that have the same names and shapes.

    proven: whether SGLang has been seen to use the same places.
    """

    places: list[Place]
    proven: bool = False
    _targets: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, manager: Any, shapes: Shapes) -> "Places":
        """Look up the places. Raises ValueError if the tensors do not fit the model."""
        places = list(_places(manager, shapes))
        for place in places:
            expected = torch.empty(shapes[place.name], device="meta")[place.rows, place.columns]
            found = place.target(0).shape
            if found != expected.shape:
                raise ValueError(
                    f"the adapter does not fit the engine's model: {place.name} has the shape "
                    f"{list(shapes[place.name])}, and there is memory for {list(found)}"
                )
        return cls(places)

    def agree(self, tensors: Mapping[str, torch.Tensor], slot: int) -> bool:
        """Return True if there is a place for each tensor, and the slot holds it there."""
        return {place.name for place in self.places} == tensors.keys() and all(
            torch.equal(place.target(slot), place.part(tensors[place.name]).to(place.memory))
            for place in self.places
        )

    def copy(self, tensors: Mapping[str, torch.Tensor], slot: int) -> None:
        """Copy all tensors to their places in a slot."""
        if slot not in self._targets:
            self._targets[slot] = [place.target(slot) for place in self.places]
        torch._foreach_copy_(
            self._targets[slot], [place.part(tensors[place.name]) for place in self.places]
        )


def clear(memory_pool: Any, slot: int) -> None:
    """Set a slot of SGLang's memory to zero."""
    buffers = [*memory_pool.A_buffer.values(), *memory_pool.B_buffer.values()]
    torch._foreach_zero_([tensor[slot] for layers in buffers for tensor in layers])


def _places(manager: Any, shapes: Shapes) -> Iterator[Place]:
    from sglang.srt.lora.utils import get_target_module_name

    pool = manager.memory_pool
    by_layer = {name.partition(".layers.")[2]: name for name in shapes}
    for number, modules in enumerate(manager.lora_modules):
        for path, module in modules.items():
            names = _names(path, by_layer)
            if not names:
                continue
            kind = get_target_module_name(path, pool.target_modules)
            a, b = pool.A_buffer[kind][number], pool.B_buffer[kind][number]
            yield from _places_of_a(module, [n for n, _ in names], shapes, a)
            yield from _places_of_b(module, [n for _, n in names], shapes, b)


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
    module: Any, names: list[str], shapes: Shapes, memory: torch.Tensor
) -> Iterator[Place]:
    """Yield the places of matrices A, [rank, in], which are stacked; a rank has some columns."""
    inputs = shapes[names[0]][1]
    columns = module.slice_lora_a_weights(torch.arange(inputs)[None])[0].tolist()
    first = 0
    for name in names:
        rank = shapes[name][0]
        for part, start in runs(columns):
            length = part.stop - part.start
            yield Place(
                name,
                WHOLE,
                WHOLE if length == inputs else part,
                memory,
                slice(first, first + rank),
                slice(start, start + length),
            )
        first += rank


def _places_of_b(
    module: Any, names: list[str], shapes: Shapes, memory: torch.Tensor
) -> Iterator[Place]:
    """Yield the places of matrices B, [out, rank], which are stacked; a rank has some rows."""
    heights = [shapes[name][0] for name in names]
    rows = module.slice_lora_b_weights(torch.arange(sum(heights))[:, None])[:, 0].tolist()
    rank, offset = shapes[names[0]][1], 0
    for name, height in zip(names, heights, strict=True):
        local = [row - offset if offset <= row < offset + height else -1 for row in rows]
        for part, start in runs(local):
            length = part.stop - part.start
            yield Place(
                name,
                WHOLE if length == height else part,
                WHOLE,
                memory,
                slice(start, start + length),
                slice(0, rank),
            )
        offset += height
