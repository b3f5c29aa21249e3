"""verl.utils.rollout_trace: a decorator without effect, as the worker records the traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


def rollout_trace_op(func: _Function) -> _Function:
    """Return the function unchanged."""
    return func
