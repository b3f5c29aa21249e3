"""The places of a checkpoint's matrices in the parameters of one rank of the engine.

An engine joins some matrices of a checkpoint to one parameter, and a rank has a part of them. Its
own loader says which: it loads matrices whose elements are the numbers of their rows, then of their
columns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# Most separate parts of a parameter's matrices. A loader that makes more of them mixes rows, and a
# product for each part would be slow.
_MOST_PARTS = 64
Parameters = Mapping[str, torch.nn.Parameter]
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a matrix of the checkpoint, and the rows and columns of a parameter that it fills.

    matrix, parameter: their names in checkpoint and engine.
    """

    matrix: str
    rows: slice
    columns: slice
    parameter: str
    target_rows: slice
    target_columns: slice

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.target_rows, self.target_columns]


def find_places(
    load: Loader, shapes: Mapping[str, tuple[int, int]], parameters: Parameters, device: Any
) -> list[Place]:
    """Return the places of all matrices of these shapes. The parameters keep their values.

    Parameters
    ----------
    load
        The model's loader of weights.
    shapes
        Rows and columns of the matrices, by their names in the checkpoint.
    parameters
        Those that the matrices fill, by their names in the model; [rows, columns] each.
    device
        Device of the parameters.

    Raises
    ------
    ValueError
        The loader puts a matrix elsewhere, or changes it.

    """
    first_rows, first = dict[str, int](), 1
    for name, (rows, _) in shapes.items():
        first_rows[name] = first
        first += rows
    with _in_place_of(parameters) as found:
        load(
            (name, torch.arange(first, first + rows, device=device)[:, None].expand(rows, columns))
            for (name, (rows, columns)), first in zip(
                shapes.items(), first_rows.values(), strict=True
            )
        )
        row_numbers = {name: tensor.clone() for name, tensor in found.items()}
        load(
            (name, torch.arange(1, columns + 1, device=device).expand(rows, columns))
            for name, (rows, columns) in shapes.items()
        )
        places = [
            place
            for name, tensor in found.items()
            for place in _places(name, row_numbers[name], tensor, shapes, first_rows)
        ]
    if lost := shapes.keys() - {place.matrix for place in places}:
        raise ValueError(f"the engine keeps {min(lost)} in an unknown place")
    return places


@contextmanager
def _in_place_of(parameters: Parameters) -> Iterator[dict[str, torch.Tensor]]:
    """Give the parameters other memory, in which all numbers of rows and columns are exact."""
    own = {name: parameter.data for name, parameter in parameters.items()}
    found = {}
    try:
        for name, parameter in parameters.items():
            found[name] = torch.zeros_like(own[name], dtype=torch.float32)
            parameter.data = found[name]
        yield found
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def _places(
    parameter: str,
    row_numbers: torch.Tensor,
    column_numbers: torch.Tensor,
    shapes: Mapping[str, tuple[int, int]],
    first_rows: Mapping[str, int],
) -> Iterator[Place]:
    """Yield the places of a parameter, from the numbers of rows and columns that it got."""
    rows = row_numbers.amax(1).long().tolist()
    parts = 0
    for matrix, first in first_rows.items():
        height, width = shapes[matrix]
        local = [row - first if first <= row < first + height else -1 for row in rows]
        for part, start in runs(local):
            parts += 1
            target_rows = slice(start, start + part.stop - part.start)
            columns = (column_numbers[start].long() - 1).tolist()
            strips = list(runs(columns))
            if parts > _MOST_PARTS or len(strips) != 1:
                raise ValueError(f"the engine mixes rows or columns of {matrix}")
            ((strip, offset),) = strips
            yield Place(
                matrix,
                part,
                strip if strip != slice(0, width) else slice(None),
                parameter,
                target_rows,
                slice(offset, offset + strip.stop - strip.start),
            )


def runs(numbers: list[int]) -> Iterator[tuple[slice, int]]:
    """Yield runs of consecutive numbers and their positions; negative numbers are left out."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end < len(numbers) and numbers[end] == numbers[end - 1] + 1 and numbers[end - 1] >= 0:
            continue
        if numbers[start] >= 0:
            yield slice(numbers[start], numbers[end - 1] + 1), start
        start = end
