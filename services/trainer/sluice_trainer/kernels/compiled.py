"""torch.compile for elementwise functions, on machines that can use it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from sluice_trainer.distributed.device import DEVICE

P = ParamSpec("P")
T = TypeVar("T")

# True if torch.compile can be used: it generates Triton kernels, and Triton needs a C compiler. On
# the CPU compiling costs more than it saves.
COMPILED = (
    DEVICE.type == "cuda"
    and importlib.util.find_spec("triton") is not None
    and any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang"))
)


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function through torch.compile if possible, otherwise the function itself.

    The results agree up to rounding. Sizes are dynamic, so rows of all lengths share one kernel.
    """
    return torch.compile(function, dynamic=True) if COMPILED else function
