"""Batches, steps, checkpoints and rewinds."""

from collections.abc import Callable

import pytest

from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.errors import InvalidCallError, PreconditionError, StaleAttemptError
from sluice_buffer.transitions.submits import SubmitOutcome
from tests.unit.buffer.buffer_tools import House, make_sample, shard_group

Make = Callable[..., House]


def test_a_batch_is_the_lowest_finished_groups_and_never_changes(house: Make) -> None:
    one = house(rollout__mode="async", rollout__maxStaleness=1)
    leased = one.lease(count=8)
    for position in (7, 1, 6, 3, 5):
        one.submit(leased[position])
    assert one.buffer.take(1, 1) is None
    first = one.buffer.sequences(1, 2)
    one.submit(leased[0])
    one.restart()
    assert one.buffer.take(1, 1) is None
    assert one.buffer.sequences(1, 2) == first
    assert sorted({s.group_id for s in first}) == [1, 3, 5, 6]


def test_a_batch_is_shared_out_to_all_ranks_by_tokens_and_by_operations(house: Make) -> None:
    one = house()
    for group in one.lease(count=4):
        one.submit(group)
    assert one.buffer.take(1, 1) is None
    by_tokens, by_flops = (one.buffer.sequences(1, 3, n0) for n0 in (0.0, 2.0))
    for shared in (by_tokens, by_flops):
        assert {s.rank for s in shared} == {0, 1, 2}


def test_what_a_batch_waits_for_is_said(house: Make) -> None:
    one = house()
    assert one.buffer.take(1, 1) == "0 of 4 groups finished, no worker has asked for more"
    first = one.lease(count=2)
    one.lease("rollout-1")
    one.submit(first[0])
    one.give_back(first[1])
    expected = "1 of 4 groups finished, 1 leased by rollout-1, 1 came back and wait for a worker"
    assert one.buffer.take(1, 1) == one.stats.waiting_for == expected


def test_only_the_next_step_can_be_taken(house: Make) -> None:
    one = house()
    with pytest.raises(
        PreconditionError, match="step 2 cannot be taken: the last committed step is 0"
    ):
        one.buffer.take(2, 1)
    with pytest.raises(InvalidCallError):
        one.buffer.take(0, 1)


def test_a_commit_is_idempotent_and_in_order(house: Make) -> None:
    one = house()
    one.fill(4)
    with pytest.raises(PreconditionError, match="batch 1 was never taken"):
        one.buffer.commit(1, 1, 1, {})
    one.step(1)
    one.buffer.commit(1, 1, 1, {})
    with pytest.raises(InvalidCallError, match="step 2 makes weight version 2, not 1"):
        one.buffer.commit(2, 1, 1, {})
    assert one.counters["groups_trained"] == 4


def test_an_older_trainer_is_refused_after_a_restart_too(house: Make) -> None:
    one = house()
    one.buffer.rewind(0, 3)
    one.restart()
    for call in (
        lambda: one.buffer.take(1, 2),
        lambda: one.buffer.rewind(0, 2),
        lambda: one.buffer.commit(1, 1, 2, {}),
    ):
        with pytest.raises(StaleAttemptError, match="trainer attempt 2: attempt 3 has been here"):
            call()


def test_a_rewind_serves_the_same_batches_again(house: Make) -> None:
    one = house()
    for step in range(1, 4):
        one.fill(4, version=step - 1)
        one.step(step)
    batches = {step: one.buffer.sequences(step, 1) for step in (2, 3)}
    assert one.buffer.rewind(1, 2) == 2
    assert one.counters["groups_trained"] == 4
    one.restart()
    for step in (2, 3):
        assert one.buffer.take(step, 2) is None
        assert one.buffer.sequences(step, 1) == batches[step]
        one.buffer.commit(step, step, 2, {})
    assert one.counters["groups_trained"] == 12
    one.check()


def test_a_rewind_cannot_go_behind_a_checkpoint_or_ahead(house: Make) -> None:
    one = house()
    for step in (1, 2):
        one.fill(4, version=step - 1)
        one.step(step)
    one.buffer.commit_checkpoint(1, 1)
    with pytest.raises(
        PreconditionError,
        match="cannot rewind to step 0: the samples of steps up to 1 were forgotten",
    ):
        one.buffer.rewind(0, 1)
    with pytest.raises(
        PreconditionError, match="cannot rewind to step 3: the last committed step is 2"
    ):
        one.buffer.rewind(3, 1)
    assert one.buffer.rewind(1, 1) == 1


def test_a_checkpoint_forgets_samples_but_not_the_fact(house: Make) -> None:
    one = house()
    one.fill(4)
    one.step(1)
    stored = one.buffer.memory.stored
    assert stored > 0
    assert one.buffer.commit_checkpoint(1, 1) == 4
    one.restart()
    assert one.buffer.memory.stored == 0
    assert list(one.buffer.storage.scan("samples")) == []
    assert one.counters["groups_trained"] == 4
    with pytest.raises(
        PreconditionError, match="step 1: its samples were forgotten when checkpoint 1 was made"
    ):
        one.buffer.take(1, 1)
    with pytest.raises(PreconditionError, match="checkpoint 2: the last committed step is 1"):
        one.buffer.commit_checkpoint(2, 1)
    one.check()


def test_a_submit_for_a_forgotten_group_is_a_duplicate(house: Make) -> None:
    one = house()
    leased = one.lease(count=4)
    for group in leased:
        one.submit(group)
    one.step(1)
    one.buffer.commit_checkpoint(1, 1)
    assert one.submit(leased[0]).outcome is SubmitOutcome.DUPLICATE


def test_an_async_batch_waits_for_what_would_become_too_old(house: Make) -> None:
    one = house(rollout__mode="async", rollout__maxStaleness=1)
    slow, *others = one.lease(count=8)
    for group in others:
        one.submit(group)
    one.step(1)
    assert not one.buffer.batches.late(2), "a batch's worth is not there yet"
    one.fill(4, version=1)
    waiting = one.buffer.take(2, 1)
    assert waiting == "1 groups that would be too old for the next batch: 0, 1 leased by rollout-0"
    assert one.buffer.waiting_for() == waiting, "not that seven of four have finished"
    assert one.buffer.batches.late(2)
    one.submit(slow)
    assert not one.buffer.batches.late(2)
    assert 0 in one.step(2)
    assert one.counters["stale_groups"] == 0


def test_partial_rollouts_do_not_wait_and_are_counted(house: Make) -> None:
    one = house(rollout__mode="async", rollout__maxStaleness=1, rollout__partial={"enabled": True})
    slow, *others = one.lease(count=8)
    for group in others:
        one.submit(group)
    one.step(1)
    one.fill(4, version=1)
    one.step(2)
    one.submit(slow)
    one.fill(4, version=2)
    assert 0 in one.step(3)
    assert one.counters["stale_groups"] == 1
    assert one.stats.policy_lag == pytest.approx((2 + 2 + 1 + 1 + 1 + 1 + 1 + 1) / 8, abs=0.5)


def test_over_sampling_in_mode_sync_generates_the_surplus_again(house: Make) -> None:
    one = house(rollout__overSampling=2.0)
    leased = one.lease(count=99)
    assert len(leased) == 8
    for group in leased[:6]:
        one.submit(group)
    assert one.step(1) == [0, 1, 2, 3]
    assert one.counters["groups_outdated"] == 4
    assert one.submit(leased[7]).outcome is SubmitOutcome.STALE
    again = one.lease(count=99, version=1)
    assert [g.prompt.group_id for g in again[:5]] == [4, 5, 6, 7, 8]
    one.check()


def test_over_sampling_in_mode_async_keeps_the_surplus(house: Make) -> None:
    one = house(rollout__overSampling=1.5, rollout__mode="async", rollout__maxStaleness=1)
    for group in one.lease(count=99)[:6]:
        one.submit(group)
    one.step(1)
    assert one.stats.depth == 2
    assert one.counters["groups_outdated"] == 0


def test_epochs_end_in_exhaustion_and_leave_an_incomplete_batch_out(house: Make) -> None:
    one = house(rows=5, trainer={"epochs": 2})
    assert one.stats.total_steps == 2
    for step in (1, 2):
        one.fill(4, version=step - 1)
        one.step(step)
    assert one.lease(count=9, version=2) == []
    assert not one.buffer.over
    one.buffer.commit_checkpoint(2, 1)
    assert one.buffer.over
    assert sum(1 for _ in one.buffer.storage.scan("groups")) == 8


def test_a_filter_can_end_the_prompts_before_the_last_planned_step(house: Make) -> None:
    one = house(rows=8, trainer={"epochs": 1}, rollout__dynamicFilter="nonzero_std")
    one.fill(2, reward=1.0)
    one.fill(4)
    one.step(1)
    one.fill(2, version=1)
    assert one.lease(count=9, version=1) == []
    assert one.buffer.batches.exhausted
    assert one.buffer.take(2, 1) == "2 of 4 groups finished, no worker has asked for more"
    assert one.stats.total_steps == 1
    one.check()


def test_a_shard_has_this_ranks_samples_and_harmless_failed_ones(house: Make) -> None:
    one = house(rollout__batchSize=1)
    leased = one.lease()[0]
    group = pb.SampleGroup(prompt=leased.prompt, samples=[
        make_sample(0), pb.Sample(index=1, status=pb.SAMPLE_STATUS_FAILED, error="x")])  # fmt: skip
    one.submit_group(group)
    one.step(1)
    shard = shard_group(one.buffer, 0, [1])
    assert [(s.index, s.reward, len(s.tokens)) for s in shard.samples] == [(1, 0.0, 16)]
    whole = shard_group(one.buffer, 0, [0, 1])
    assert whole.samples[0] == group.samples[0]
    assert sum(len(s.tokens) // 4 for s in whole.samples) == sum(
        s.length or 4 for s in one.buffer.sequences(1, 1)
    )
