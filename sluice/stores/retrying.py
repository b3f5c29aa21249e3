"""Repeat operations on a store that fail for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from sluice.stores.errors import StoreError

T = TypeVar("T")


def retried(
    operation: Callable[[], T],
    pauses: Iterable[float],
    *,
    is_final: Callable[[StoreError], bool] = lambda error: not error.transient,
    report: Callable[[StoreError, float], None] = lambda _error, _pause: None,
) -> T:
    """Repeat an operation until it succeeds, and return its result.

    Parameters
    ----------
    operation
        Raises StoreError if it fails.
    pauses
        Seconds between attempts. After the last pause there is one more attempt. They are asked for
        one at a time, after each failure.
    is_final
        Returns True for an error after which another attempt makes no sense.
    report
        Called with an error and the pause that follows it.

    Raises
    ------
    StoreError
        The error of the last attempt.

    """
    remaining = iter(pauses)
    while True:
        try:
            return operation()
        except StoreError as error:
            pause = None if is_final(error) else next(remaining, None)
            if pause is None:
                raise
            report(error, pause)
        time.sleep(pause)


def until(deadline: float, first: float, longest: float) -> Iterator[float]:
    """Yield pauses, each twice as long as the one before, while they end before the deadline.

    Parameters
    ----------
    deadline
        Time of `time.monotonic()`.
    first, longest
        Seconds of the first pause, and of the longest.

    """
    pause = first
    while time.monotonic() + pause <= deadline:
        yield pause
        pause = min(2 * pause, longest)
