"""Parameters of which every test run takes a part, and `make test-long` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """Return all names as parameters; those that are not chosen are marked `long`.

    Choose those that can fail for reasons of their own.
    """
    every = list(names)
    _check(every, chosen)
    return [
        name if name in chosen else pytest.param(name, marks=pytest.mark.long) for name in every
    ]


def slow(names: Iterable[str], *chosen: str) -> list[Any]:
    """Return all names as parameters; those that are chosen are marked `long`."""
    every = list(names)
    _check(every, chosen)
    return quick(every, *(name for name in every if name not in chosen))


def _check(names: Collection[str], chosen: Collection[str]) -> None:
    unknown = set(chosen) - set(names)
    assert not unknown, f"no such parameters: {sorted(unknown)}"
