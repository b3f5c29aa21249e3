"""Coroutines side by side, of which the first that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Their results, in order. Raises the first error, once none runs any more.

    (`asyncio.gather` leaves the others running.)
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
