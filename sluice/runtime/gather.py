"""Run coroutines concurrently, and cancel all once one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    If one raises, the others are cancelled, and the first error is raised once all have ended.
    (`asyncio.gather` would leave the others running.)
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
