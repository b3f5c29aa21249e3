"""How many of the groups that there are one of several workers gets. Pure."""

from __future__ import annotations


def part(room: int, *, available: int, workers: int, rooms: int) -> int:
    """Groups for a worker, so that all that ask have equal room left once the groups are gone.

    A worker asks for as much as its engine has places for, which is often a whole batch: without a
    bound the first to ask would get all of a step, and the other engines nothing. Rounded up, so
    that the parts together are never less than what there is.

    room: groups that this worker has room for. available: groups that there are. workers: that ask
    now, this one included. rooms: the sum of their rooms.
    """
    left_to_all = rooms - available
    return min(room, max(0, -((left_to_all - workers * room) // workers)))
