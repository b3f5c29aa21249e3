"""Notices that something has stopped: a deadline that counts from the last progress, not from the
start.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stall:
    """patience: seconds without progress that are too many."""

    patience: float
    _progress: object = None
    _since: float = 0.0

    def over(self, progress: object, now: float) -> bool:
        """True where `progress` has been the same for longer than `patience`. now: seconds of a
        monotonic clock.
        """
        if progress != self._progress:
            self._progress, self._since = progress, now
        return now - self._since > self.patience
