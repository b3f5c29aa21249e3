"""The storage fills up: a checkpoint is asked for in time, and what can never fit is said."""

from collections.abc import Callable

import pytest
from buffer_tools import House

from sluice_buffer.storage import StorageFullError

Make = Callable[..., House]
BIG = 40_000
"""Response tokens of a sample: a batch of 4 groups of 2 takes some 3.2 MB."""


def step(one: House, number: int) -> None:
    one.fill(4, version=number - 1, response=BIG)
    one.step(number)


def test_a_checkpoint_is_wanted_before_a_batch_has_no_room(house: Make) -> None:
    one = house(rows=40, buffer__storage__size="10Mi")
    step(one, 1)
    assert not one.buffer.checkpoint_wanted()
    step(one, 2)
    assert one.buffer.checkpoint_wanted(), "a third batch has no room"
    one.buffer.commit_checkpoint(2, 1)
    one.sync()
    assert not one.buffer.checkpoint_wanted()
    step(one, 3)
    assert one.buffer.dead_end() == ""


def test_without_anything_to_forget_no_checkpoint_is_asked_for(house: Make) -> None:
    one = house(rows=40, buffer__storage__size="4Mi")
    one.fill(2, response=BIG)
    assert not one.buffer.checkpoint_wanted()


def test_a_batch_that_does_not_fit_ends_the_job_in_words(house: Make) -> None:
    one = house(rows=40, buffer__storage__size="3Mi")
    leased = one.lease(count=4)
    one.submit(leased[0], response=BIG)
    one.submit(leased[1], response=BIG)
    assert one.buffer.dead_end() == ""
    one.submit(leased[2], response=BIG)
    with pytest.raises(StorageFullError):
        one.submit(leased[3], response=BIG)
    assert one.buffer.dead_end().startswith("spec.buffer.storage.size: one batch does not fit. ")
    assert "of 4 groups take" in one.buffer.dead_end()


def test_where_a_checkpoint_would_make_room_the_job_goes_on(house: Make) -> None:
    one = house(rows=40, buffer__storage__size="6Mi")
    step(one, 1)
    leased = one.lease(count=4, version=1)
    assert len(leased) == 2, "no more than can be stored is leased"
    one.submit(leased[0], response=BIG, version=1)
    with pytest.raises(StorageFullError):
        one.submit(leased[1], response=2 * BIG, version=1)
    assert one.buffer.dead_end() == ""
    assert one.buffer.checkpoint_wanted()
    one.buffer.commit_checkpoint(1, 1)
    assert one.buffer.dead_end() == "", "what found no room may have some now"
    one.submit(leased[1], response=2 * BIG, version=1)
