"""The first weights of an adapter, which depend on no backend and no layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def initial_a(module: str, rank: int, inputs: int, seed: int) -> Tensor:
    """Draw the matrix A of an adapter as PEFT does: Kaiming-uniform with a = sqrt(5).

    Each module has a separate generator, so that a rank that holds part of the model draws the
    same numbers as one that holds all of it.

    Parameters
    ----------
    module
        Name of the adapted layer in the transformers model.
    rank, inputs
        Rows and columns of A.
    seed
        Seed of the run.

    Returns
    -------
    [rank, inputs] float32 on the CPU.

    """
    generator = torch.Generator().manual_seed(seed_of(module, seed))
    a = torch.empty(rank, inputs)
    torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    return a


def seed_of(module: str, seed: int) -> int:
    """Return the seed of one module's first weights."""
    digest = hashlib.sha256(f"{seed}/{module}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
