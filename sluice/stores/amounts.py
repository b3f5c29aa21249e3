"""Bytes and how fast they arrive, for people."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(size: float) -> str:
    """Return bytes in the largest unit of which there is one: `812 B`, `61.4 GB`."""
    unit = _unit(size)
    return _in_unit(size, unit)


def progress_text(done: int, total: int, rate: float = 0.0) -> str:
    """Return how far a fetch is: `41.0 of 61.4 GB, 1.2 GB/s`.

    Parameters
    ----------
    done, total
        Bytes. total: 0 if it is not known.
    rate
        Bytes per second; 0 leaves them out.

    """
    speed = f", {size_text(rate)}/s" if rate > 0 else ""
    if not total:
        return f"{size_text(done)}{speed}"
    unit = _unit(total)
    return f"{_in_unit(done, unit).rpartition(' ')[0]} of {_in_unit(total, unit)}{speed}"


def _unit(size: float) -> int:
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return unit


def _in_unit(size: float, unit: int) -> str:
    digits = 1 if unit else 0
    return f"{size / 1000**unit:.{digits}f} {_UNITS[unit]}"
