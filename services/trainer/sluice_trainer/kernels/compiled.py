"""Functions of one tensor after another, as one kernel where that is possible."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from sluice_trainer.distributed.device import DEVICE

P = ParamSpec("P")
T = TypeVar("T")

COMPILED = (
    DEVICE.type == "cuda"
    and importlib.util.find_spec("triton") is not None
    and any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang"))
)
"""torch.compile makes Triton kernels, and Triton needs a C compiler. On the CPU compiling costs
more than it saves."""


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """The function through torch.compile where that can be, else as it is. Its result does not
    depend on it beyond rounding. Sizes are dynamic: rows of every length share one kernel.
    """
    return torch.compile(function, dynamic=True) if COMPILED else function
