"""The storage fills up: a checkpoint is asked for in time, and what can never fit is said."""

from collections.abc import Callable

import pytest

from sluice_buffer.state.storage import StorageFullError
from tests.unit.buffer.buffer_tools import LocalBuffer

MakeBuffer = Callable[..., LocalBuffer]
# Response tokens of a sample: a batch of 4 groups of 2 takes some 3.2 MB.
BIG = 40_000


def step(buffer: LocalBuffer, number: int) -> None:
    buffer.fill(4, version=number - 1, response=BIG)
    buffer.step(number)


def test_a_checkpoint_is_wanted_before_a_batch_has_no_room(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rows=40, buffer__storage__size="10Mi")
    step(buffer, 1)
    assert not buffer.core.capacity.checkpoint_wanted()
    step(buffer, 2)
    assert buffer.core.capacity.checkpoint_wanted(), "a third batch has no room"
    buffer.core.commit_checkpoint(2, 1)
    buffer.sync()
    assert not buffer.core.capacity.checkpoint_wanted()
    step(buffer, 3)
    assert buffer.core.dead_end() == ""


def test_without_anything_to_forget_no_checkpoint_is_asked_for(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rows=40, buffer__storage__size="4Mi")
    buffer.fill(2, response=BIG)
    assert not buffer.core.capacity.checkpoint_wanted()


def test_a_batch_that_does_not_fit_ends_the_job_in_words(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rows=40, buffer__storage__size="3Mi")
    leased = buffer.lease(count=4)
    buffer.submit(leased[0], response=BIG)
    buffer.submit(leased[1], response=BIG)
    assert buffer.core.dead_end() == ""
    buffer.submit(leased[2], response=BIG)
    with pytest.raises(StorageFullError):
        buffer.submit(leased[3], response=BIG)
    assert buffer.core.dead_end().startswith("spec.buffer.storage.size: one batch does not fit. ")
    assert "of 4 groups take" in buffer.core.dead_end()


def test_where_a_checkpoint_would_make_room_the_job_goes_on(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rows=40, buffer__storage__size="6Mi")
    step(buffer, 1)
    leased = buffer.lease(count=4, version=1)
    assert len(leased) == 2, "no more than can be stored is leased"
    buffer.submit(leased[0], response=BIG, version=1)
    with pytest.raises(StorageFullError):
        buffer.submit(leased[1], response=2 * BIG, version=1)
    assert buffer.core.dead_end() == ""
    assert buffer.core.capacity.checkpoint_wanted()
    buffer.core.commit_checkpoint(1, 1)
    assert buffer.core.dead_end() == "", "what found no room may have some now"
    buffer.submit(leased[1], response=2 * BIG, version=1)


def small_steps(buffer: LocalBuffer, steps: int) -> int:
    """Train batches of small groups until no group can be leased.

    Returns how many checkpoints were requested.
    """
    checkpoints = 0
    for number in range(1, steps + 1):
        buffer.clock.now += 1
        while (missing := buffer.core.policy.batch_size - len(buffer.core.memory.finished)) > 0:
            leased = buffer.lease(count=missing, version=number - 1)
            for lease in leased:
                buffer.submit(lease, samples=8, response=40, version=number - 1)
            if leased:
                continue
            if not buffer.core.capacity.checkpoint_wanted():
                return checkpoints
            buffer.core.commit_checkpoint(number - 1, 1)
            buffer.sync()
            buffer.clock.now += 1
            checkpoints += 1
        buffer.step(number)
    return checkpoints


def small_groups(make_buffer: MakeBuffer, size: str) -> LocalBuffer:
    return make_buffer(
        rows=3000,
        rollout__batchSize=64,
        rollout__samplesPerPrompt=8,
        rollout__sampling__maxResponseTokens=40,
        buffer__storage__size=size,
        trainer__steps=40,
    )


def test_the_records_of_groups_leave_room_for_the_checkpoint_that_frees_space(
    make_buffer: MakeBuffer,
) -> None:
    buffer = small_groups(make_buffer, "4Mi")
    assert small_steps(buffer, 24) >= 3
    assert buffer.core.memory.progress.step == 24
    assert buffer.core.dead_end() == ""


def test_records_that_leave_no_room_for_a_batch_end_the_job_in_words(
    make_buffer: MakeBuffer,
) -> None:
    buffer = small_groups(make_buffer, "1Mi")
    small_steps(buffer, 40)
    assert 2 < buffer.core.memory.progress.step < 40
    assert buffer.core.dead_end().startswith("spec.buffer.storage.size: one batch does not fit. ")
    assert "the records of the " in buffer.core.dead_end()
