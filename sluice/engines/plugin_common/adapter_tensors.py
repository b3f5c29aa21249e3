"""The tensors of an adapter, as they come with weight updates: by PEFT's names.

This file runs in the processes of every engine, linked from each plugin, and imports the standard
library only.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

# PEFT's prefix of the names of an adapter's tensors.
PREFIX = "base_model.model."
# Tensor of one element that comes with an adapter: the factor of B A.
SCALING = f"{PREFIX}lora_scaling"
# Said of an update that has not brought any of the matrices.
EMPTY = "an update of an adapter has brought no tensors"


class Matrix(NamedTuple):
    """A matrix A, [rank, in], or B, [out, rank]. layer: name of its layer, with the prefix."""

    layer: str
    is_a: bool
    rank: int


def is_adapter(names: Sequence[str]) -> bool:
    """Return True if a bucket's tensors are of an adapter and not of the model."""
    return bool(names) and names[0].startswith(PREFIX)


def matrix_of(name: str, shape: Sequence[int]) -> Matrix:
    """Return which matrix a tensor is. Raises ValueError if it is none."""
    layer, _, side = name.removesuffix(".weight").rpartition(".")
    if side not in ("lora_A", "lora_B") or len(shape) != 2:
        raise ValueError(f"{name} {list(shape)} is no matrix A or B of an adapter")
    is_a = side == "lora_A"
    return Matrix(layer, is_a, shape[0 if is_a else 1])


def check_fits(
    shapes: Mapping[str, Sequence[int]],
    most: int,
    adapted: Collection[str],
    adapts: Callable[[str], bool],
) -> None:
    """Check that an engine has memory for an adapter's tensors of these shapes, by their names.

    Parameters
    ----------
    shapes
        Shapes of the tensors; the factor among them is no matrix.
    most
        Largest rank that the engine was started for.
    adapted
        Layers that may have an adapter, as a message names them.
    adapts
        Whether a layer of this name, such as `q_proj`, may have one.

    Raises
    ------
    ValueError
        A tensor does not fit.

    """
    for name, shape in shapes.items():
        if name == SCALING:
            continue
        matrix = matrix_of(name, shape)
        if matrix.rank > most:
            raise ValueError(
                f"the adapter has rank {matrix.rank}, and this engine was started for {most}"
            )
        if not adapts(matrix.layer.rpartition(".")[2]):
            raise ValueError(
                f"this engine adapts {', '.join(sorted(adapted))}, not {matrix.layer}: add "
                f"{matrix.layer.rpartition('.')[2]} to trainer.lora.excludeModules"
            )
