"""Reads and encodes large requests in threads, so that the event loop answers others meanwhile.

A thread costs a small request more than the work itself. The tokenizer releases the interpreter
lock while it works. The pool is not the event loop's default pool, because that one also ends
programs, which must not wait for the programs' texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LARGE_CHARACTERS = 32 * 1024  # some milliseconds of a core
_POOL = ThreadPoolExecutor(2, "gateway")
P = ParamSpec("P")
T = TypeVar("T")


async def run(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, in a thread if the request has many characters."""
    if size < LARGE_CHARACTERS:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_POOL, lambda: work(*args, **kwargs))
