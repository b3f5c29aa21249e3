"""Table of the adapters' tensors in PEFT's files that make up Megatron's adapters.

transformers has an adapter for each projection. Megatron computes some projections by one layer
(queries, keys and values; gate and up), whose adapter has the matrices A of all of them, stacked,
and one B, whose rows are in the order of the layer's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sluice_trainer.megatron.huggingface.entries import Entry, Source, entries
from sluice_trainer.model.huggingface_config import ModelShape
from sluice_trainer.model.huggingface_files import VALUE_HEAD

A, B = "lora_A.weight", "lora_B.weight"
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class AdapterEntries:
    """The adapter of one of Megatron's linear layers.

    Attributes
    ----------
    layer
        Name of the layer; layers are numbered over the whole model.
    a, b
        Its parameters: [projections x rank, in] and [out, rank].
    projections
        Number of projections that have an adapter.
    row_parallel
        True if tensor-parallel ranks share the layer's input, False if they share its output.

    """

    layer: str
    a: Entry
    b: Entry
    projections: int
    row_parallel: bool
    _weight: Entry
    _adapted: tuple[int, ...]

    def owners(self, rank: int, size: int) -> Tensor | None:
        """Return which projection each row of this rank's output belongs to, [out, projections].

        1.0 for that projection, otherwise 0; rows of a projection without an adapter have only
        zeros. None if all rows belong to one.
        """
        if len(self._weight.hf) == 1:
            return None
        rows = [
            _one_hot(self._adapted, number, source) for number, source in enumerate(self._weight.hf)
        ]
        return self._weight.shard(rows, rank, size).reshape(-1, self.projections)


def _one_hot(adapted: tuple[int, ...], number: int, source: Source) -> Tensor:
    rows = torch.zeros(source[1][0], len(adapted))
    if number in adapted:
        rows[:, adapted.index(number)] = 1.0
    return rows


def linear_modules(shape: ModelShape) -> set[str]:
    """Return the names of the decoder's linear layers in transformers, without their places."""
    return {_name(source) for weight in _linear_weights(shape, 1) for source in weight.hf}


def adapter_entries(
    shape: ModelShape, tensor: int, targets: AbstractSet[str], rank: int
) -> Iterator[AdapterEntries]:
    """Yield the adapters of the targeted layers, in the order of the model.

    Parameters
    ----------
    shape
        Shape of the model.
    tensor
        Number of tensor-parallel ranks.
    targets
        Names of transformers' layers that have an adapter, without their places.
    rank
        Rank of the adapters.

    """
    for weight in _linear_weights(shape, tensor):
        adapted = tuple(n for n, source in enumerate(weight.hf) if _name(source) in targets)
        if adapted:
            yield _entries(weight, adapted, rank)


def value_head(shape: ModelShape) -> Iterator[Entry]:
    """Yield the value head of a critic, which is trained whole, in float32."""
    if shape.value_head:
        head = next(entry for entry in entries(shape, 1) if entry.hf[0][0] == VALUE_HEAD)
        yield replace(head, dtype=torch.float32)


def _linear_weights(shape: ModelShape, tensor: int) -> Iterator[Entry]:
    """Yield the weights that tensor-parallel ranks share, without embedding and output layer.

    Every rank holds all of a router or a norm, and experts are in another group.
    """
    for entry in entries(shape, tensor):
        in_layer = entry.parameter.startswith("decoder.layers.")
        shared = entry.group == "tensor" and entry.split is not None
        if in_layer and shared and entry.parameter.endswith(_WEIGHT):
            yield entry


def _entries(weight: Entry, adapted: tuple[int, ...], rank: int) -> AdapterEntries:
    layer = weight.parameter.removesuffix(_WEIGHT)
    inputs = weight.full[-1]
    modules = [weight.hf[number][0].removesuffix(_WEIGHT) for number in adapted]
    row_parallel = weight.split == len(weight.full) - 1
    a = Entry(
        f"{layer}.adapter.a",
        tuple((f"{module}.{A}", (rank, inputs)) for module in modules),
        (len(modules), rank, inputs),
        2 if row_parallel else None,
        torch.stack,
        lambda full: list(full.unbind(0)),
        dtype=torch.float32,
    )

    def arrange(tensors: list[Tensor]) -> Tensor:
        given = dict(zip(adapted, tensors, strict=True))
        # Rows of projections without an adapter are 0 and never learn.
        absent = [torch.zeros(size[0], rank) for _, size in weight.hf]
        return weight.arrange([given.get(n, zeros) for n, zeros in enumerate(absent)])

    def take_apart(full: Tensor) -> list[Tensor]:
        parts = weight.take_apart(full)
        return [parts[number] for number in adapted]

    b = Entry(
        f"{layer}.adapter.b",
        tuple(
            (f"{module}.{B}", (weight.hf[number][1][0], rank))
            for module, number in zip(modules, adapted, strict=True)
        ),
        (*weight.full[:-1], rank),
        None if row_parallel else weight.split,
        arrange,
        take_apart,
        dtype=torch.float32,
    )
    return AdapterEntries(layer, a, b, len(modules), row_parallel, weight, adapted)


def _name(source: Source) -> str:
    return source[0].removesuffix(_WEIGHT).rpartition(".")[2]
