"""The storage fills up: a checkpoint is asked for in time, and what can never fit is said."""

from collections.abc import Callable

import pytest

from sluice_buffer.state.storage import StorageFullError
from tests.unit.buffer.buffer_tools import House

Make = Callable[..., House]
BIG = 40_000
"""Response tokens of a sample: a batch of 4 groups of 2 takes some 3.2 MB."""


def step(one: House, number: int) -> None:
    one.fill(4, version=number - 1, response=BIG)
    one.step(number)


def test_a_checkpoint_is_wanted_before_a_batch_has_no_room(house: Make) -> None:
    one = house(rows=40, buffer__storage__size="10Mi")
    step(one, 1)
    assert not one.buffer.capacity.checkpoint_wanted()
    step(one, 2)
    assert one.buffer.capacity.checkpoint_wanted(), "a third batch has no room"
    one.buffer.commit_checkpoint(2, 1)
    one.sync()
    assert not one.buffer.capacity.checkpoint_wanted()
    step(one, 3)
    assert one.buffer.dead_end() == ""


def test_without_anything_to_forget_no_checkpoint_is_asked_for(house: Make) -> None:
    one = house(rows=40, buffer__storage__size="4Mi")
    one.fill(2, response=BIG)
    assert not one.buffer.capacity.checkpoint_wanted()


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
    assert one.buffer.capacity.checkpoint_wanted()
    one.buffer.commit_checkpoint(1, 1)
    assert one.buffer.dead_end() == "", "what found no room may have some now"
    one.submit(leased[1], response=2 * BIG, version=1)


def small_steps(one: House, steps: int) -> int:
    """Train batches of groups of a page each, until nothing can be leased; how many checkpoints
    were asked for."""
    checkpoints = 0
    for number in range(1, steps + 1):
        one.clock.now += 1
        while (missing := one.buffer.policy.batch_size - len(one.buffer.memory.finished)) > 0:
            leased = one.lease(count=missing, version=number - 1)
            for each in leased:
                one.submit(each, samples=8, response=40, version=number - 1)
            if leased:
                continue
            if not one.buffer.capacity.checkpoint_wanted():
                return checkpoints
            one.buffer.commit_checkpoint(number - 1, 1)
            one.sync()
            one.clock.now += 1
            checkpoints += 1
        one.step(number)
    return checkpoints


def small_groups(house: Make, size: str) -> House:
    return house(
        rows=3000,
        rollout__batchSize=64,
        rollout__samplesPerPrompt=8,
        rollout__sampling__maxResponseTokens=40,
        buffer__storage__size=size,
        trainer__steps=40,
    )


def test_the_records_of_groups_leave_room_for_the_checkpoint_that_frees_space(house: Make) -> None:
    one = small_groups(house, "4Mi")
    assert small_steps(one, 24) >= 3
    assert one.buffer.memory.progress.step == 24
    assert one.buffer.dead_end() == ""


def test_records_that_leave_no_room_for_a_batch_end_the_job_in_words(house: Make) -> None:
    one = small_groups(house, "1Mi")
    small_steps(one, 40)
    assert 2 < one.buffer.memory.progress.step < 40
    assert one.buffer.dead_end().startswith("spec.buffer.storage.size: one batch does not fit. ")
    assert "the records of the " in one.buffer.dead_end()
