"""Leases, submits and returns on a real database, with a clock that stands still."""

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
from tests.unit.buffer.buffer_tools import House, make_group, make_sample

Make = Callable[..., House]
ABORTED = pb.SAMPLE_STATUS_ABORTED


def beat(house: House, ids: list[str], worker: str = "rollout-0", attempt: int = 1) -> list[str]:
    return house.buffer.heartbeat(
        WorkerAttempt(worker, attempt), [(one, parse_lease_id(one)) for one in ids]
    )


def test_leases_stop_at_the_staleness_budget(house: Make) -> None:
    one = house()
    assert len(one.lease(count=99)) == 4
    assert one.lease("rollout-1", 99) == []


def test_a_worker_with_older_weights_gets_nothing_of_the_next_batch(house: Make) -> None:
    one = house()
    one.fill(4)
    one.step(1)
    assert one.lease(count=9, version=0) == []
    assert len(one.lease(count=9, version=1)) == 4


def test_async_leases_run_ahead_by_max_staleness(house: Make) -> None:
    one = house(rollout__mode="async", rollout__maxStaleness=2)
    assert len(one.lease(count=99)) == 12


def test_a_lease_that_expires_goes_to_the_next_worker_first(house: Make) -> None:
    one = house(rollout__mode="async", rollout__maxStaleness=1)
    first = one.lease(count=2)
    one.clock.now += 61
    assert one.buffer.expire() == 2
    again = one.lease("rollout-1", 3)
    assert [(g.prompt.group_id, g.prompt.lease_attempt) for g in again] == [(0, 2), (1, 2), (2, 1)]
    assert one.submit(first[0]).outcome is SubmitOutcome.STALE
    assert one.submit(again[0]).outcome is SubmitOutcome.STORED
    assert one.submit(again[0]).outcome is SubmitOutcome.DUPLICATE
    assert one.counters["leases_expired"] == 2


def test_a_late_submit_is_welcome_while_nobody_else_has_the_group(house: Make) -> None:
    one = house()
    late = one.lease()[0]
    one.clock.now += 61
    one.buffer.expire()
    assert one.submit(late).outcome is SubmitOutcome.STORED
    assert [g.prompt.group_id for g in one.lease(count=9)] == [1, 2, 3]


def test_heartbeats_extend_and_name_what_to_drop(house: Make) -> None:
    one = house()
    mine, theirs = one.lease(count=1)[0], one.lease("rollout-1", 1)[0]
    one.clock.now += 50
    assert beat(one, [mine.prompt.lease_id]) == []
    one.clock.now += 50
    assert one.buffer.expire() == 1
    ids = [mine.prompt.lease_id, theirs.prompt.lease_id, "nonsense"]
    assert beat(one, ids) == ids[1:]


def test_a_finished_group_is_not_dropped(house: Make) -> None:
    one = house()
    leased = one.lease()[0]
    one.submit(leased)
    assert beat(one, [leased.prompt.lease_id]) == []


def test_a_newer_attempt_frees_the_leases_of_the_older_one(house: Make) -> None:
    one = house()
    old = one.lease(count=4)
    new = one.lease(count=9, attempt=2)
    assert [g.prompt.group_id for g in new] == [0, 1, 2, 3]
    with pytest.raises(StaleAttemptError, match="rollout-0 attempt 1: attempt 2 has been here"):
        one.lease(attempt=1)
    assert one.submit(old[0]).outcome is SubmitOutcome.STALE


def test_leases_survive_a_restart_with_their_full_time(house: Make) -> None:
    one = house()
    leased = one.lease(count=2)
    one.clock.now += 59
    one.restart()
    one.clock.now += 59
    assert one.buffer.expire() == 0
    assert beat(one, [g.prompt.lease_id for g in leased]) == []
    assert one.submit(leased[1]).outcome is SubmitOutcome.STORED


def test_partial_samples_go_to_the_next_worker(house: Make) -> None:
    one = house()
    leased = one.lease()[0]
    sample = make_sample(1, status=ABORTED, reward=None, response=3)
    assert one.give_back(leased, [sample]) == (True, "")
    one.restart()
    again = one.lease("rollout-1")[0]
    assert again.prompt.group_id == 0
    assert list(again.partial.samples) == [sample]
    assert one.submit(again).outcome is SubmitOutcome.STORED
    assert one.buffer.storage.value("partials", bytes(8)) is None


def test_a_lease_that_expires_keeps_what_was_returned_before(house: Make) -> None:
    one = house()
    one.give_back(one.lease()[0], [make_sample(0, status=ABORTED, reward=None)])
    one.lease("rollout-1")
    one.clock.now += 61
    one.buffer.expire()
    assert len(one.lease("rollout-2")[0].partial.samples) == 1


def test_a_return_of_a_lease_that_is_gone_is_refused(house: Make) -> None:
    one = house()
    leased = one.lease()[0]
    one.submit(leased)
    assert one.give_back(leased)[0] is False


def test_a_group_that_meets_an_error_each_time_is_failed_with_its_reason(house: Make) -> None:
    one = house()
    for attempt in range(MAX_FAILURES):
        leased = one.lease()[0]
        assert leased.prompt.group_id == 0
        one.give_back(
            leased, failure=f"EngineError: engine answered 500: attempt {attempt}\nTraceback ..."
        )
    assert one.lease()[0].prompt.group_id == 1
    assert one.counters["groups_failed"] == 1
    assert one.stats.failed == {"EngineError_engine_answered_attempt": 1}
    assert one.submit(leased).outcome is SubmitOutcome.FILTERED
    one.restart()
    (failure,) = failures(one.buffer.storage, one.buffer.prompts, 0)
    assert (failure.serial, failure.group_id, failure.dataset, failure.row) == (
        1,
        0,
        "prompts",
        leased.prompt.row,
    )
    assert failure.reason == f"EngineError: engine answered 500: attempt {MAX_FAILURES - 1}"
    assert (failure.leases, failure.version) == (MAX_FAILURES, -1)
    one.check()


def test_a_drain_never_fails_a_group(house: Make) -> None:
    one = house()
    for _ in range(2 * MAX_FAILURES):
        one.give_back(one.lease()[0])
    assert one.counters["groups_failed"] == 0
    assert one.lease()[0].prompt.group_id == 0


def test_a_return_with_progress_never_fails_a_group(house: Make) -> None:
    one = house()
    for length in range(1, 2 * MAX_FAILURES):
        one.give_back(
            one.lease()[0], [make_sample(0, status=ABORTED, reward=None, response=length)]
        )
    assert one.counters["groups_failed"] == 0


def test_a_broken_group_is_refused_and_its_lease_goes_back(house: Make) -> None:
    one = house()
    leased = one.lease(count=4)
    broken = make_group(leased[0].prompt)
    broken.samples[1].loss_mask = b""
    answer = one.submit_group(broken)
    assert answer.outcome is SubmitOutcome.REFUSED
    assert "samples[1].lossMask: 0 entries for 6 response tokens" in answer.message
    assert one.submit(leased[1]).outcome is SubmitOutcome.STORED
    assert one.lease()[0].prompt.group_id == 0
    assert one.counters["submits_refused"] == 1


def test_nonsense_is_refused(house: Make) -> None:
    one = house()
    assert one.buffer.submit(b"\xff\xff").outcome is SubmitOutcome.REFUSED
    never = make_group(pb.Prompt(group_id=3, lease_id="t3.1"))
    assert one.submit_group(never).message == "prompt.groupId: group 3 was never leased"
    other = make_group(pb.Prompt(group_id=4, lease_id="t3.1"))
    assert "'t3.1' is not a lease of this group" in one.submit_group(other).message


def test_filtered_groups_free_their_place(house: Make) -> None:
    one = house(rollout__dynamicFilter="nonzero_std")
    leased = one.lease(count=4)
    assert one.submit(leased[0], reward=1.0).outcome is SubmitOutcome.FILTERED
    assert one.submit(leased[1]).outcome is SubmitOutcome.STORED
    assert [g.prompt.group_id for g in one.lease(count=9)] == [4]
    assert one.submit(leased[0], reward=1.0).outcome is SubmitOutcome.FILTERED
    assert (one.counters["groups_filtered"], one.counters["filtered_zero_std_1.0"]) == (1, 1)
    one.restart()
    assert one.counters["groups_filtered"] == 1
    one.check()


def test_a_workers_own_filter_is_counted_by_reason(house: Make) -> None:
    one = house(rollout__dynamicFilter="my.module.keep")
    group = make_group(one.lease()[0].prompt)
    group.samples[0].metadata_json = '{"filtered": "Too Easy!"}'
    answer = one.submit_group(group)
    assert (answer.outcome, answer.message) == (SubmitOutcome.FILTERED, "filtered: Too Easy!")
    assert one.counters["filtered_too_easy"] == 1


def test_a_group_of_failed_samples_is_dropped_and_not_tried_again(house: Make) -> None:
    one = house()
    answer = one.submit(one.lease()[0], status=pb.SAMPLE_STATUS_FAILED)
    assert (answer.outcome, answer.message) == (
        SubmitOutcome.FILTERED,
        "failed: reward raised ValueError",
    )
    assert one.counters["groups_failed"] == 1
    assert one.lease()[0].prompt.group_id == 1


def test_a_group_with_a_failed_sample_stays_whole(house: Make) -> None:
    one = house(rollout__batchSize=1)
    group = make_group(one.lease()[0].prompt)
    group.samples[0].CopyFrom(make_sample(0, status=pb.SAMPLE_STATUS_FAILED, reward=None))
    assert one.submit_group(group).outcome is SubmitOutcome.STORED
    one.step(1)
    assert [(s.reward, s.trainable_tokens) for s in one.buffer.sequences(1, 1)] == [
        (0.0, 0),
        (1.0, 6),
    ]


def test_a_full_storage_stops_leases_and_submits_and_recovers(house: Make) -> None:
    one = house(rows=500, rollout__batchSize=4, buffer__storage__size="3Mi", trainer__steps=100)
    for step in range(1, 40):
        leased = one.lease(count=4, version=step - 1)
        try:
            for group in leased:
                one.submit(group, response=20_000, version=step - 1)
            assert len(leased) == 4
        except (StorageFullError, AssertionError):
            break
        one.step(step)
    else:
        raise AssertionError("the storage was never full")
    assert step > 1
    assert one.lease(count=4, version=step - 1) == []
    depth = one.stats.depth
    one.check()
    one.restart()
    assert one.stats.depth == depth
    assert "room in the storage" in one.stats.waiting_for
    assert one.buffer.commit_checkpoint(step - 1, 1) == 4 * (step - 1)
    one.sync()
    for group in one.lease(count=4, version=step - 1) or leased:
        one.submit(group, response=20_000, version=step - 1)
    one.check()
