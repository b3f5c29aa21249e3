"""The next action of all ranks, which rank 0 decides."""

from __future__ import annotations

import enum


class Action(enum.IntEnum):
    """The next action, as rank 0 broadcasts it."""

    WAIT = 0
    TRAIN = 1
    UPDATE_JOINERS = 2
    STOP = 3
    END = 4
    SAVE = 5
