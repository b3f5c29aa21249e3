"""A bad group harms only itself, and failures are reported."""

from collections.abc import Callable, Sequence

import pytest
from prometheus_client import generate_latest

from sluice.samples.sample import PROMPT_TOO_LONG
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_buffer.rules.admission import MAX_FAILURES, SUSPECT_FAILURES, barren_limit, filter_limit
from sluice_buffer.serving.metrics import registry
from sluice_buffer.serving.readback import failures
from sluice_buffer.transitions.failures import first_line, reason_name
from sluice_buffer.transitions.submits import SubmitOutcome
from tests.unit.buffer.buffer_tools import LocalBuffer, make_group, make_sample

MakeBuffer = Callable[..., LocalBuffer]
FAILED = common.SAMPLE_STATUS_FAILED


def ids(leased: Sequence[pb.LeasedGroup]) -> list[int]:
    return [lease.prompt.group_id for lease in leased]


def test_only_the_group_that_ends_its_workers_fails(make_buffer: MakeBuffer) -> None:
    """Group 2 ends every worker that has it. All others must be finished, whoever had them."""
    buffer = make_buffer(rollout__batchSize=8, trainer__steps=1)
    attempt = 1
    finished: set[int] = set()
    while len(finished) < 7:
        leased = buffer.lease(count=8, attempt=attempt)
        assert leased, "a group waits and nobody gets it"
        if 2 in ids(leased):  # it dies at once, whatever else it had
            attempt += 1
            continue
        for group in leased:
            buffer.submit(group)
            finished.add(group.prompt.group_id)
    while (leased := buffer.lease(count=8, attempt=attempt)) and 2 in ids(leased):
        attempt += 1
    assert attempt <= MAX_FAILURES + 1
    assert buffer.counters["groups_failed"] == 1
    (failure,) = failures(buffer.core.storage, buffer.core.prompts, 0)
    assert (failure.group_id, failure.leases) == (2, MAX_FAILURES)
    assert "was replaced" in failure.reason
    buffer.check()


def test_suspects_are_handed_out_one_at_a_time_beside_others(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__batchSize=8, rollout__overSampling=2.0)
    for attempt in range(1, SUSPECT_FAILURES + 1):
        assert ids(buffer.lease(count=4, attempt=attempt)) == [0, 1, 2, 3]
    attempt = SUSPECT_FAILURES + 1
    assert ids(buffer.lease(count=3, attempt=attempt)) == [0, 4, 5], "one suspect, and new ones"
    assert ids(buffer.lease("rollout-1", count=2)) == [1, 6], "another worker may have the next"
    assert ids(buffer.lease(count=1, attempt=attempt)) == [7]
    buffer.restart()
    assert ids(buffer.lease("rollout-2", count=1)) == [2], (
        "who is under suspicion is known after a restart"
    )


def test_a_suspect_of_an_evaluation_is_alone_as_well(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(evaluation={"everySteps": 2})
    for attempt in range(1, SUSPECT_FAILURES + 1):
        assert len(buffer.lease(count=3, attempt=attempt)) == 3
    leased = buffer.lease(count=2, attempt=SUSPECT_FAILURES + 1)
    assert [(g.prompt.purpose, g.prompt.group_id) for g in leased] == [
        (common.PURPOSE_EVALUATE, 0), (common.PURPOSE_TRAIN, 0)
    ]  # fmt: skip


def fail(buffer: LocalBuffer, count: int, error: str) -> None:
    for _ in range(count):
        (leased,) = buffer.lease(count=1)
        buffer.submit(leased, status=FAILED, reward=None, error=error)


def test_a_job_of_which_every_sample_fails_is_given_up_with_the_reason(
    make_buffer: MakeBuffer,
) -> None:
    buffer = make_buffer(rows=200)
    limit = barren_limit(4)
    fail(buffer, limit - 2, "prompts row 7: reward.py:score raised KeyError: 'answer'\n  File ...")
    assert buffer.core.dead_end() == ""
    fail(buffer, 2, "prompts row 8: timed out after 30 s")
    assert buffer.core.dead_end() == (
        f"{limit} groups in a row failed, and not one of their samples can be trained. "
        f"{limit - 2} times: prompts row 7: reward.py:score raised KeyError: 'answer'; "
        "2 times: prompts row 8: timed out after 30 s"
    )
    assert buffer.lease(count=1) == [], "nothing more is burnt"
    assert buffer.stats.waiting_for == buffer.core.dead_end()
    assert buffer.counters["groups_failed"] == 0, "they wait for a start with a reward that works"
    buffer.restart()
    assert buffer.core.dead_end() == ""
    again = buffer.lease(count=5)
    assert ids(again) == [0, 1, 2, 3], "no more than a synchronous batch may train"
    assert {group.prompt.lease_attempt for group in again} == {2}
    buffer.check()


def test_one_usable_sample_between_them_is_enough_to_go_on(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rows=400)
    for _ in range(2):
        fail(buffer, barren_limit(4) - 1, "reward raised ValueError")
        buffer.submit(buffer.lease(count=1)[0], reward=1.0)
    assert buffer.core.dead_end() == ""
    assert buffer.counters["groups_failed"] == 2 * (barren_limit(4) - 1)


def test_a_failure_is_not_blamed_on_the_filter(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__dynamicFilter="nonzero_std")
    answer = buffer.submit(
        buffer.lease()[0], status=FAILED, reward=None, error="reward raised ValueError"
    )
    assert (answer.outcome, answer.message) == (
        SubmitOutcome.FILTERED,
        "failed: reward raised ValueError",
    )
    assert buffer.counters["groups_failed"] == 1
    text = generate_latest(registry(lambda: buffer.stats)).decode()
    assert (
        'sluice_buffer_groups_failed_by_reason_total{reason="reward_raised_ValueError"} 1.0' in text
    )


def drop(buffer: LocalBuffer, count: int, reward: float) -> None:
    for _ in range(count):
        (leased,) = buffer.lease(count=1)
        assert buffer.submit(leased, reward=reward).outcome is SubmitOutcome.FILTERED


def test_a_job_whose_filter_keeps_nothing_is_given_up_with_the_filters_name(
    make_buffer: MakeBuffer,
) -> None:
    buffer = make_buffer(rows=50, rollout__dynamicFilter="nonzero_std")
    limit = filter_limit(4)
    drop(buffer, limit - 2, 0.0)
    assert buffer.core.dead_end() == ""
    assert buffer.stats.waiting_for == (
        "0 of 4 groups finished, no worker has asked for more; the dynamic filter dropped the last "
        f"{limit - 2} groups (the job is given up at {limit})"
    )
    drop(buffer, 2, 1.0)
    assert buffer.core.dead_end() == (
        f"the dynamic filter (rollout.dynamicFilter: nonzero_std) dropped the last {limit} groups "
        f"and kept none: {limit - 2} times zero_std_0.0, 2 times zero_std_1.0. It keeps a prompt "
        "only if the rewards of its responses differ: check the reward and the labels, use easier "
        "or harder prompts, more rollout.samplesPerPrompt or a higher "
        "rollout.sampling.temperature, or leave the filter out"
    )
    assert buffer.lease(count=1) == [], "nothing more is burnt"
    assert buffer.counters["groups_filtered"] == 0, "they wait for a start with other settings"
    buffer.restart()
    assert buffer.core.dead_end() == ""
    assert ids(buffer.lease(count=9)) == [0, 1, 2, 3]
    buffer.check()


def test_one_group_that_the_filter_keeps_is_enough_to_go_on(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rows=50, rollout__dynamicFilter="my.module.keep", trainer__steps=9)
    limit = filter_limit(4)
    for _ in range(2):
        for number in range(limit - 1):
            (leased,) = buffer.lease(count=1)
            group = make_group(leased.prompt)
            reason = PROMPT_TOO_LONG if number % 100 == 0 else "too easy"
            group.samples[0].metadata_json = f'{{"filtered": "{reason}"}}'
            buffer.core.submit(group.SerializeToString())
        buffer.submit(buffer.lease(count=1)[0])
    assert buffer.core.dead_end() == ""
    assert len(buffer.core.memory.dropped) == 0


def test_a_custom_filter_that_keeps_nothing_is_named(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__dynamicFilter="my.module.keep")
    for _ in range(filter_limit(4)):
        group = make_group(buffer.lease(count=1)[0].prompt)
        group.samples[0].metadata_json = '{"filtered": "too easy"}'
        buffer.core.submit(group.SerializeToString())
    assert buffer.core.dead_end() == (
        "the dynamic filter (rollout.dynamicFilter: my.module.keep) dropped the last 1024 groups "
        "and kept none: 1024 times too easy. Look at what it expects of a group, or leave it out"
    )


def test_prompts_that_are_too_long_are_not_blamed_on_the_filter(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rows=2000, rollout__dynamicFilter="nonzero_std")
    for _ in range(filter_limit(4)):
        group = make_group(buffer.lease(count=1)[0].prompt)
        group.samples[0].metadata_json = f'{{"filtered": "{PROMPT_TOO_LONG}"}}'
        buffer.core.submit(group.SerializeToString())
    assert buffer.core.dead_end() == ""
    assert "filter" not in buffer.stats.waiting_for


def test_a_group_that_went_back_may_return_a_partial_response(make_buffer: MakeBuffer) -> None:
    """The reason for which it failed before is no number of tokens."""
    buffer = make_buffer(rows=200)
    fail(buffer, barren_limit(4), "reward raised ValueError")
    buffer.restart()
    (leased,) = buffer.lease(count=1)
    partial = make_sample(0, status=common.SAMPLE_STATUS_ABORTED, reward=None, response=3)
    assert buffer.give_back(leased, [partial]) == (True, "")


def test_no_prompt_of_an_epoch_fits(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rows=6, rollout__batchSize=6)
    for _ in range(6):
        group = buffer.lease(count=1)[0]
        message = common.SampleGroup(
            prompt=group.prompt, samples=[common.Sample(index=i, status=FAILED) for i in (0, 1)]
        )
        message.samples[0].error = "the prompt has 9 tokens, at most 8 fit"
        message.samples[0].metadata_json = '{"filtered": "prompt_too_long"}'
        buffer.submit_group(message)
    assert (
        buffer.core.dead_end()
        == "no prompt of a whole epoch fits (6); the last: the prompt has 9 tokens, at most 8 fit"
    )


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        pytest.param("", "no reason given", "no_reason_given", id="empty"),
        pytest.param("\n  KeyError: 'x'\nmore", "KeyError: 'x'", "KeyError_x", id="lines"),
        pytest.param("math row 12: a.py:f raised E: 3 of 4", "math row 12: a.py:f raised E: 3 of 4",
                     "a_py_f_raised_E_of", id="of a row"),
        pytest.param("12345", "12345", "unnamed", id="no words"),
        pytest.param("reward /a/b.py:f: KeyError: 'x' (b.py:2)", "reward /a/b.py:f: KeyError: 'x' "
                                                                 "(b.py:2)",
                     "reward_KeyError_x_b_py", id="with a path"),
    ],
)  # fmt: skip
def test_a_reason_has_a_line_for_people_and_a_name_for_counters(
    text: str, line: str, name: str
) -> None:
    assert first_line(text) == line
    assert reason_name(line) == name
