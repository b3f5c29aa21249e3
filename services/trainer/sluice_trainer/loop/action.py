"""The next thing that all ranks do, which rank 0 decides."""

from __future__ import annotations

import enum


class Action(enum.IntEnum):
    """The next thing to do, as rank 0 tells the other ranks."""

    WAIT = 0
    TRAIN = 1
    SYNC = 2
    STOP = 3
    END = 4
    SAVE = 5
