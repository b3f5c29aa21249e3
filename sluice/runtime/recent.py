"""Values that are kept as long as those used more recently leave room for them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by name; the least recently used ones make room for others.

    Parameters
    ----------
    limit
        Bytes of all values. A larger value is kept alone.

    """

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._kept: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def get(self, name: str) -> T | None:
        """Return a value; None if it is not kept."""
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def put(self, name: str, value: T, size: int) -> T:
        """Keep a value of `size` bytes, and return it."""
        if name in self._kept:
            self._size -= self._kept.pop(name)[1]
        self._kept[name] = value, size
        self._size += size
        while self._size > self._limit and len(self._kept) > 1:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._size -= dropped
        return value
