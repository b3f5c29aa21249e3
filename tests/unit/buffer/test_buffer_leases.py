"""Leases, submits and returns on a real database, with a clock that tests move."""

from collections.abc import Callable

import pytest

from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.errors import StaleAttemptError
from sluice_buffer.group import parse_lease_id
from sluice_buffer.rules.admission import MAX_FAILURES
from sluice_buffer.serving.readback import failures
from sluice_buffer.state.storage import StorageFullError
from sluice_buffer.transitions.leases import WorkerAttempt
from sluice_buffer.transitions.submits import SubmitOutcome
from tests.unit.buffer.buffer_tools import LocalBuffer, make_group, make_sample

MakeBuffer = Callable[..., LocalBuffer]
ABORTED = pb.SAMPLE_STATUS_ABORTED


def beat(
    buffer: LocalBuffer, ids: list[str], worker: str = "rollout-0", attempt: int = 1
) -> list[str]:
    return buffer.core.heartbeat(
        WorkerAttempt(worker, attempt), [(name, parse_lease_id(name)) for name in ids]
    )


def test_leases_stop_at_the_staleness_budget(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    assert len(buffer.lease(count=99)) == 4
    assert buffer.lease("rollout-1", 99) == []


def test_a_worker_with_older_weights_gets_nothing_of_the_next_batch(
    make_buffer: MakeBuffer,
) -> None:
    buffer = make_buffer()
    buffer.fill(4)
    buffer.step(1)
    assert buffer.lease(count=9, version=0) == []
    assert len(buffer.lease(count=9, version=1)) == 4


def test_async_leases_run_ahead_by_max_staleness(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__mode="async", rollout__maxStaleness=2)
    assert len(buffer.lease(count=99)) == 12


def test_a_lease_that_expires_goes_to_the_next_worker_first(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__mode="async", rollout__maxStaleness=1)
    first = buffer.lease(count=2)
    buffer.clock.now += 61
    assert buffer.core.expire() == 2
    again = buffer.lease("rollout-1", 3)
    assert [(g.prompt.group_id, g.prompt.lease_attempt) for g in again] == [(0, 2), (1, 2), (2, 1)]
    assert buffer.submit(first[0]).outcome is SubmitOutcome.STALE
    assert buffer.submit(again[0]).outcome is SubmitOutcome.STORED
    assert buffer.submit(again[0]).outcome is SubmitOutcome.DUPLICATE
    assert buffer.counters["leases_expired"] == 2


def test_a_late_submit_is_welcome_while_nobody_else_has_the_group(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    late = buffer.lease()[0]
    buffer.clock.now += 61
    buffer.core.expire()
    assert buffer.submit(late).outcome is SubmitOutcome.STORED
    assert [g.prompt.group_id for g in buffer.lease(count=9)] == [1, 2, 3]


def test_heartbeats_extend_and_name_what_to_drop(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    mine, theirs = buffer.lease(count=1)[0], buffer.lease("rollout-1", 1)[0]
    buffer.clock.now += 50
    assert beat(buffer, [mine.prompt.lease_id]) == []
    buffer.clock.now += 50
    assert buffer.core.expire() == 1
    ids = [mine.prompt.lease_id, theirs.prompt.lease_id, "nonsense"]
    assert beat(buffer, ids) == ids[1:]


def test_a_finished_group_is_not_dropped(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    leased = buffer.lease()[0]
    buffer.submit(leased)
    assert beat(buffer, [leased.prompt.lease_id]) == []


def test_a_newer_attempt_frees_the_leases_of_the_older_one(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    old = buffer.lease(count=4)
    new = buffer.lease(count=9, attempt=2)
    assert [g.prompt.group_id for g in new] == [0, 1, 2, 3]
    with pytest.raises(StaleAttemptError, match="rollout-0 attempt 1 was replaced by attempt 2"):
        buffer.lease(attempt=1)
    assert buffer.submit(old[0]).outcome is SubmitOutcome.STALE


def test_leases_survive_a_restart_with_their_full_time(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    leased = buffer.lease(count=2)
    buffer.clock.now += 59
    buffer.restart()
    buffer.clock.now += 59
    assert buffer.core.expire() == 0
    assert beat(buffer, [g.prompt.lease_id for g in leased]) == []
    assert buffer.submit(leased[1]).outcome is SubmitOutcome.STORED


def test_partial_samples_go_to_the_next_worker(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    leased = buffer.lease()[0]
    sample = make_sample(1, status=ABORTED, reward=None, response=3)
    assert buffer.give_back(leased, [sample]) == (True, "")
    buffer.restart()
    again = buffer.lease("rollout-1")[0]
    assert again.prompt.group_id == 0
    assert list(again.partial.samples) == [sample]
    assert buffer.submit(again).outcome is SubmitOutcome.STORED
    assert buffer.core.storage.value("partials", bytes(8)) is None


def test_a_lease_that_expires_keeps_what_was_returned_before(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    buffer.give_back(buffer.lease()[0], [make_sample(0, status=ABORTED, reward=None)])
    buffer.lease("rollout-1")
    buffer.clock.now += 61
    buffer.core.expire()
    assert len(buffer.lease("rollout-2")[0].partial.samples) == 1


def test_a_return_of_a_lease_that_is_gone_is_refused(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    leased = buffer.lease()[0]
    buffer.submit(leased)
    assert buffer.give_back(leased)[0] is False


def test_a_group_that_meets_an_error_each_time_is_failed_with_its_reason(
    make_buffer: MakeBuffer,
) -> None:
    buffer = make_buffer()
    for attempt in range(MAX_FAILURES):
        leased = buffer.lease()[0]
        assert leased.prompt.group_id == 0
        buffer.give_back(
            leased, failure=f"EngineError: engine answered 500: attempt {attempt}\nTraceback ..."
        )
    assert buffer.lease()[0].prompt.group_id == 1
    assert buffer.counters["groups_failed"] == 1
    assert buffer.stats.failed == {"EngineError_engine_answered_attempt": 1}
    assert buffer.submit(leased).outcome is SubmitOutcome.FILTERED
    buffer.restart()
    (failure,) = failures(buffer.core.storage, buffer.core.prompts, 0)
    assert (failure.serial, failure.group_id, failure.dataset, failure.row) == (
        1,
        0,
        "prompts",
        leased.prompt.row,
    )
    assert failure.reason == f"EngineError: engine answered 500: attempt {MAX_FAILURES - 1}"
    assert (failure.leases, failure.version) == (MAX_FAILURES, -1)
    buffer.check()


def test_a_drain_never_fails_a_group(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    for _ in range(2 * MAX_FAILURES):
        buffer.give_back(buffer.lease()[0])
    assert buffer.counters["groups_failed"] == 0
    assert buffer.lease()[0].prompt.group_id == 0


def test_a_return_with_progress_never_fails_a_group(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    for length in range(1, 2 * MAX_FAILURES):
        buffer.give_back(
            buffer.lease()[0], [make_sample(0, status=ABORTED, reward=None, response=length)]
        )
    assert buffer.counters["groups_failed"] == 0


def test_a_broken_group_is_refused_and_its_lease_goes_back(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    leased = buffer.lease(count=4)
    broken = make_group(leased[0].prompt)
    broken.samples[1].loss_mask = b""
    answer = buffer.submit_group(broken)
    assert answer.outcome is SubmitOutcome.REFUSED
    assert "samples[1].lossMask: 0 entries for 6 response tokens" in answer.message
    assert buffer.submit(leased[1]).outcome is SubmitOutcome.STORED
    assert buffer.lease()[0].prompt.group_id == 0
    assert buffer.counters["submits_refused"] == 1


def test_nonsense_is_refused(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    assert buffer.core.submit(b"\xff\xff").outcome is SubmitOutcome.REFUSED
    never = make_group(pb.Prompt(group_id=3, lease_id="t3.1"))
    assert buffer.submit_group(never).message == "prompt.groupId: group 3 was never leased"
    other = make_group(pb.Prompt(group_id=4, lease_id="t3.1"))
    assert "'t3.1' is not a lease of this group" in buffer.submit_group(other).message


def test_filtered_groups_free_their_place(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__dynamicFilter="nonzero_std")
    leased = buffer.lease(count=4)
    assert buffer.submit(leased[0], reward=1.0).outcome is SubmitOutcome.FILTERED
    assert buffer.submit(leased[1]).outcome is SubmitOutcome.STORED
    assert [g.prompt.group_id for g in buffer.lease(count=9)] == [4]
    assert buffer.submit(leased[0], reward=1.0).outcome is SubmitOutcome.FILTERED
    assert (buffer.counters["groups_filtered"], buffer.counters["filtered_zero_std_1.0"]) == (1, 1)
    buffer.restart()
    assert buffer.counters["groups_filtered"] == 1
    buffer.check()


def test_a_workers_own_filter_is_counted_by_reason(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__dynamicFilter="my.module.keep")
    group = make_group(buffer.lease()[0].prompt)
    group.samples[0].metadata_json = '{"filtered": "Too Easy!"}'
    answer = buffer.submit_group(group)
    assert (answer.outcome, answer.message) == (SubmitOutcome.FILTERED, "filtered: Too Easy!")
    assert buffer.counters["filtered_too_easy"] == 1


def test_a_group_of_failed_samples_is_dropped_and_not_tried_again(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    answer = buffer.submit(buffer.lease()[0], status=pb.SAMPLE_STATUS_FAILED)
    assert (answer.outcome, answer.message) == (
        SubmitOutcome.FILTERED,
        "failed: reward raised ValueError",
    )
    assert buffer.counters["groups_failed"] == 1
    assert buffer.lease()[0].prompt.group_id == 1


def test_a_group_with_a_failed_sample_stays_whole(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__batchSize=1)
    group = make_group(buffer.lease()[0].prompt)
    group.samples[0].CopyFrom(make_sample(0, status=pb.SAMPLE_STATUS_FAILED, reward=None))
    assert buffer.submit_group(group).outcome is SubmitOutcome.STORED
    buffer.step(1)
    assert [(s.reward, s.trainable_tokens) for s in buffer.core.sequences(1, 1)] == [
        (0.0, 0),
        (1.0, 6),
    ]


def test_a_full_storage_stops_leases_and_submits_and_recovers(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(
        rows=500, rollout__batchSize=4, buffer__storage__size="3Mi", trainer__steps=100
    )
    for step in range(1, 40):
        leased = buffer.lease(count=4, version=step - 1)
        try:
            for group in leased:
                buffer.submit(group, response=20_000, version=step - 1)
            assert len(leased) == 4
        except (StorageFullError, AssertionError):
            break
        buffer.step(step)
    else:
        raise AssertionError("the storage was never full")
    assert step > 1
    assert buffer.lease(count=4, version=step - 1) == []
    depth = buffer.stats.depth
    buffer.check()
    buffer.restart()
    assert buffer.stats.depth == depth
    assert "room in the storage" in buffer.stats.waiting_for
    assert buffer.core.commit_checkpoint(step - 1, 1) == 4 * (step - 1)
    buffer.sync()
    for group in buffer.lease(count=4, version=step - 1) or leased:
        buffer.submit(group, response=20_000, version=step - 1)
    buffer.check()
