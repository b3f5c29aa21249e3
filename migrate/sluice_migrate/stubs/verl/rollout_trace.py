"""verl.utils.rollout_trace: traces are the worker's own (OpenTelemetry), so nothing is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


def rollout_trace_op(func: _Function) -> _Function:
    """The function, as it is."""
    return func
