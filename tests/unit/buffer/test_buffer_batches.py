"""Batches, steps, checkpoints and rewinds."""

from collections.abc import Callable

import pytest

from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.errors import InvalidCallError, PreconditionError, StaleAttemptError
from sluice_buffer.rules.balance import CostModel
from sluice_buffer.transitions.submits import SubmitOutcome
from tests.unit.buffer.buffer_tools import LocalBuffer, make_sample, shard_group

MakeBuffer = Callable[..., LocalBuffer]


def test_a_batch_is_the_lowest_finished_groups_and_never_changes(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__mode="async", rollout__maxStaleness=1)
    leased = buffer.lease(count=8)
    for position in (7, 1, 6, 3, 5):
        buffer.submit(leased[position])
    assert buffer.core.take(1, 1) is None
    first = buffer.core.sequences(1, 2)
    buffer.submit(leased[0])
    buffer.restart()
    assert buffer.core.take(1, 1) is None
    assert buffer.core.sequences(1, 2) == first
    assert sorted({s.group_id for s in first}) == [1, 3, 5, 6]


def test_a_batch_is_shared_out_to_all_ranks_by_tokens_and_by_operations(
    make_buffer: MakeBuffer,
) -> None:
    buffer = make_buffer()
    for group in buffer.lease(count=4):
        buffer.submit(group)
    assert buffer.core.take(1, 1) is None
    by_tokens, by_flops = (buffer.core.sequences(1, 3, CostModel(n0)) for n0 in (0.0, 2.0))
    for shared in (by_tokens, by_flops):
        assert {s.rank for s in shared} == {0, 1, 2}


def test_what_a_batch_waits_for_is_said(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    assert buffer.core.take(1, 1) == "0 of 4 groups finished, no worker has asked for more"
    first = buffer.lease(count=2)
    buffer.lease("rollout-1")
    buffer.submit(first[0])
    buffer.give_back(first[1])
    expected = "1 of 4 groups finished, 1 leased by rollout-1, 1 came back and wait for a worker"
    assert buffer.core.take(1, 1) == buffer.stats.waiting_for == expected


def test_only_the_next_step_can_be_taken(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    with pytest.raises(
        PreconditionError, match="step 2 cannot be taken: the last committed step is 0"
    ):
        buffer.core.take(2, 1)
    with pytest.raises(InvalidCallError):
        buffer.core.take(0, 1)


def test_a_commit_is_idempotent_and_in_order(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    buffer.fill(4)
    with pytest.raises(PreconditionError, match="batch 1 was never taken"):
        buffer.core.commit(1, 1, 1, {})
    buffer.step(1)
    buffer.core.commit(1, 1, 1, {})
    with pytest.raises(InvalidCallError, match="step 2 makes weight version 2, not 1"):
        buffer.core.commit(2, 1, 1, {})
    assert buffer.counters["groups_trained"] == 4


def test_an_older_trainer_is_refused_after_a_restart_too(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    buffer.core.rewind(0, 3)
    buffer.restart()
    for call in (
        lambda: buffer.core.take(1, 2),
        lambda: buffer.core.rewind(0, 2),
        lambda: buffer.core.commit(1, 1, 2, {}),
    ):
        with pytest.raises(StaleAttemptError, match="trainer attempt 2 was replaced by attempt 3"):
            call()


def test_a_rewind_serves_the_same_batches_again(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    for step in range(1, 4):
        buffer.fill(4, version=step - 1)
        buffer.step(step)
    batches = {step: buffer.core.sequences(step, 1) for step in (2, 3)}
    assert buffer.core.rewind(1, 2) == 2
    assert buffer.counters["groups_trained"] == 4
    buffer.restart()
    for step in (2, 3):
        assert buffer.core.take(step, 2) is None
        assert buffer.core.sequences(step, 1) == batches[step]
        buffer.core.commit(step, step, 2, {})
    assert buffer.counters["groups_trained"] == 12
    buffer.check()


def test_a_rewind_cannot_go_behind_a_checkpoint_or_ahead(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    for step in (1, 2):
        buffer.fill(4, version=step - 1)
        buffer.step(step)
    buffer.core.commit_checkpoint(1, 1)
    with pytest.raises(
        PreconditionError,
        match="cannot rewind to step 0: the samples of steps up to 1 were forgotten",
    ):
        buffer.core.rewind(0, 1)
    with pytest.raises(
        PreconditionError, match="cannot rewind to step 3: the last committed step is 2"
    ):
        buffer.core.rewind(3, 1)
    assert buffer.core.rewind(1, 1) == 1


def test_a_checkpoint_forgets_samples_but_not_the_fact(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    buffer.fill(4)
    buffer.step(1)
    stored = buffer.core.memory.stored
    assert stored > 0
    assert buffer.core.commit_checkpoint(1, 1) == 4
    buffer.restart()
    assert buffer.core.memory.stored == 0
    assert list(buffer.core.storage.scan("samples")) == []
    assert buffer.counters["groups_trained"] == 4
    with pytest.raises(
        PreconditionError, match="step 1: its samples were forgotten when checkpoint 1 was made"
    ):
        buffer.core.take(1, 1)
    with pytest.raises(PreconditionError, match="checkpoint 2: the last committed step is 1"):
        buffer.core.commit_checkpoint(2, 1)
    buffer.check()


def test_a_submit_for_a_forgotten_group_is_a_duplicate(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    leased = buffer.lease(count=4)
    for group in leased:
        buffer.submit(group)
    buffer.step(1)
    buffer.core.commit_checkpoint(1, 1)
    assert buffer.submit(leased[0]).outcome is SubmitOutcome.DUPLICATE


def test_an_async_batch_waits_for_what_would_become_too_old(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__mode="async", rollout__maxStaleness=1)
    slow, *others = buffer.lease(count=8)
    for group in others:
        buffer.submit(group)
    buffer.step(1)
    assert not buffer.core.batches.late(2), "a batch's worth is not there yet"
    buffer.fill(4, version=1)
    waiting = buffer.core.take(2, 1)
    assert waiting == "1 groups that would be too old for the next batch: 0, 1 leased by rollout-0"
    assert buffer.core.waiting_for() == waiting, "not that seven of four have finished"
    assert buffer.core.batches.late(2)
    buffer.submit(slow)
    assert not buffer.core.batches.late(2)
    assert 0 in buffer.step(2)
    assert buffer.counters["stale_groups"] == 0


def test_partial_rollouts_do_not_wait_and_are_counted(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(
        rollout__mode="async", rollout__maxStaleness=1, rollout__partial={"enabled": True}
    )
    slow, *others = buffer.lease(count=8)
    for group in others:
        buffer.submit(group)
    buffer.step(1)
    buffer.fill(4, version=1)
    buffer.step(2)
    buffer.submit(slow)
    buffer.fill(4, version=2)
    assert 0 in buffer.step(3)
    assert buffer.counters["stale_groups"] == 1
    assert buffer.stats.policy_lag == pytest.approx((2 + 2 + 1 + 1 + 1 + 1 + 1 + 1) / 8, abs=0.5)


def test_over_sampling_in_mode_sync_generates_the_surplus_again(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__overSampling=2.0)
    leased = buffer.lease(count=99)
    assert len(leased) == 8
    for group in leased[:6]:
        buffer.submit(group)
    assert buffer.step(1) == [0, 1, 2, 3]
    assert buffer.counters["groups_outdated"] == 4
    assert buffer.submit(leased[7]).outcome is SubmitOutcome.STALE
    again = buffer.lease(count=99, version=1)
    assert [g.prompt.group_id for g in again[:5]] == [4, 5, 6, 7, 8]
    buffer.check()


def test_over_sampling_in_mode_async_keeps_the_surplus(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__overSampling=1.5, rollout__mode="async", rollout__maxStaleness=1)
    for group in buffer.lease(count=99)[:6]:
        buffer.submit(group)
    buffer.step(1)
    assert buffer.stats.depth == 2
    assert buffer.counters["groups_outdated"] == 0


def test_epochs_end_in_exhaustion_and_leave_an_incomplete_batch_out(
    make_buffer: MakeBuffer,
) -> None:
    buffer = make_buffer(rows=5, trainer={"epochs": 2})
    assert buffer.stats.total_steps == 2
    for step in (1, 2):
        buffer.fill(4, version=step - 1)
        buffer.step(step)
    assert buffer.lease(count=9, version=2) == []
    assert not buffer.core.over
    buffer.core.commit_checkpoint(2, 1)
    assert buffer.core.over
    assert sum(1 for _ in buffer.core.storage.scan("groups")) == 8


def test_a_filter_can_end_the_prompts_before_the_last_planned_step(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rows=8, trainer={"epochs": 1}, rollout__dynamicFilter="nonzero_std")
    buffer.fill(2, reward=1.0)
    buffer.fill(4)
    buffer.step(1)
    buffer.fill(2, version=1)
    assert buffer.lease(count=9, version=1) == []
    assert buffer.core.batches.exhausted
    assert buffer.core.take(2, 1) == "2 of 4 groups finished, no worker has asked for more"
    assert buffer.stats.total_steps == 1
    buffer.check()


def test_a_shard_has_this_ranks_samples_and_harmless_failed_ones(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__batchSize=1)
    leased = buffer.lease()[0]
    group = pb.SampleGroup(prompt=leased.prompt, samples=[
        make_sample(0), pb.Sample(index=1, status=pb.SAMPLE_STATUS_FAILED, error="x")])  # fmt: skip
    buffer.submit_group(group)
    buffer.step(1)
    shard = shard_group(buffer.core, 0, [1])
    assert [(s.index, s.reward, len(s.tokens)) for s in shard.samples] == [(1, 0.0, 16)]
    whole = shard_group(buffer.core, 0, [0, 1])
    assert whole.samples[0] == group.samples[0]
    assert sum(len(s.tokens) // 4 for s in whole.samples) == sum(
        s.length or 4 for s in buffer.core.sequences(1, 1)
    )
