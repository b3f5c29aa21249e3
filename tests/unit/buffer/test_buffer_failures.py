"""One bad group harms only itself; and what fails is told."""

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
from tests.unit.buffer.buffer_tools import House, make_group, make_sample

Make = Callable[..., House]
FAILED = common.SAMPLE_STATUS_FAILED


def ids(leased: Sequence[pb.LeasedGroup]) -> list[int]:
    return [one.prompt.group_id for one in leased]


def test_only_the_group_that_ends_its_workers_fails(house: Make) -> None:
    """Group 2 ends every worker that has it. All others must come through, whoever
    was beside it.
    """
    one = house(rollout__batchSize=8, trainer__steps=1)
    attempt = 1
    finished: set[int] = set()
    while len(finished) < 7:
        leased = one.lease(count=8, attempt=attempt)
        assert leased, "a group waits and nobody gets it"
        if 2 in ids(leased):  # it dies at once, whatever else it had
            attempt += 1
            continue
        for group in leased:
            one.submit(group)
            finished.add(group.prompt.group_id)
    while (leased := one.lease(count=8, attempt=attempt)) and 2 in ids(leased):
        attempt += 1
    assert attempt <= MAX_FAILURES + 1
    assert one.counters["groups_failed"] == 1
    (failure,) = failures(one.buffer.storage, one.buffer.prompts, 0)
    assert (failure.group_id, failure.leases) == (2, MAX_FAILURES)
    assert "was replaced" in failure.reason
    one.check()


def test_suspects_are_handed_out_one_at_a_time_beside_others(house: Make) -> None:
    one = house(rollout__batchSize=8, rollout__overSampling=2.0)
    for attempt in range(1, SUSPECT_FAILURES + 1):
        assert ids(one.lease(count=4, attempt=attempt)) == [0, 1, 2, 3]
    attempt = SUSPECT_FAILURES + 1
    assert ids(one.lease(count=3, attempt=attempt)) == [0, 4, 5], "one suspect, and new ones"
    assert ids(one.lease("rollout-1", count=2)) == [1, 6], "another worker may have the next"
    assert ids(one.lease(count=1, attempt=attempt)) == [7]
    one.restart()
    assert ids(one.lease("rollout-2", count=1)) == [2], (
        "who is under suspicion is known after a restart"
    )


def test_a_suspect_of_an_evaluation_is_alone_as_well(house: Make) -> None:
    one = house(evaluation={"everySteps": 2})
    for attempt in range(1, SUSPECT_FAILURES + 1):
        assert len(one.lease(count=3, attempt=attempt)) == 3
    leased = one.lease(count=2, attempt=SUSPECT_FAILURES + 1)
    assert [(g.prompt.purpose, g.prompt.group_id) for g in leased] == [
        (common.PURPOSE_EVALUATE, 0), (common.PURPOSE_TRAIN, 0)
    ]  # fmt: skip


def fail(one: House, count: int, error: str) -> None:
    for _ in range(count):
        (leased,) = one.lease(count=1)
        one.submit(leased, status=FAILED, reward=None, error=error)


def test_a_job_of_which_every_sample_fails_is_given_up_with_the_reason(house: Make) -> None:
    one = house(rows=200)
    limit = barren_limit(4)
    fail(one, limit - 2, "prompts row 7: reward.py:score raised KeyError: 'answer'\n  File ...")
    assert one.buffer.dead_end() == ""
    fail(one, 2, "prompts row 8: timed out after 30 s")
    assert one.buffer.dead_end() == (
        f"{limit} groups in a row failed, and not one of their samples can be trained. "
        f"{limit - 2} times: prompts row 7: reward.py:score raised KeyError: 'answer'; "
        "2 times: prompts row 8: timed out after 30 s"
    )
    assert one.lease(count=1) == [], "nothing more is burnt"
    assert one.stats.waiting_for == one.buffer.dead_end()
    assert one.counters["groups_failed"] == 0, "they wait for a start with a reward that works"
    one.restart()
    assert one.buffer.dead_end() == ""
    again = one.lease(count=5)
    assert ids(again) == [0, 1, 2, 3], "no more than a synchronous batch may train"
    assert {group.prompt.lease_attempt for group in again} == {2}
    one.check()


def test_one_usable_sample_between_them_is_enough_to_go_on(house: Make) -> None:
    one = house(rows=400)
    for _ in range(2):
        fail(one, barren_limit(4) - 1, "reward raised ValueError")
        one.submit(one.lease(count=1)[0], reward=1.0)
    assert one.buffer.dead_end() == ""
    assert one.counters["groups_failed"] == 2 * (barren_limit(4) - 1)


def test_a_failure_is_not_blamed_on_the_filter(house: Make) -> None:
    one = house(rollout__dynamicFilter="nonzero_std")
    answer = one.submit(
        one.lease()[0], status=FAILED, reward=None, error="reward raised ValueError"
    )
    assert (answer.outcome, answer.message) == (
        SubmitOutcome.FILTERED,
        "failed: reward raised ValueError",
    )
    assert one.counters["groups_failed"] == 1
    text = generate_latest(registry(lambda: one.stats)).decode()
    assert (
        'sluice_buffer_groups_failed_by_reason_total{reason="reward_raised_ValueError"} 1.0' in text
    )


def drop(one: House, count: int, reward: float) -> None:
    for _ in range(count):
        (leased,) = one.lease(count=1)
        assert one.submit(leased, reward=reward).outcome is SubmitOutcome.FILTERED


def test_a_job_whose_filter_keeps_nothing_is_given_up_with_the_filters_name(house: Make) -> None:
    one = house(rows=50, rollout__dynamicFilter="nonzero_std")
    limit = filter_limit(4)
    drop(one, limit - 2, 0.0)
    assert one.buffer.dead_end() == ""
    assert one.stats.waiting_for == (
        "0 of 4 groups finished, no worker has asked for more; the dynamic filter dropped the last "
        f"{limit - 2} groups (the job is given up at {limit})"
    )
    drop(one, 2, 1.0)
    assert one.buffer.dead_end() == (
        f"the dynamic filter (rollout.dynamicFilter: nonzero_std) dropped the last {limit} groups "
        f"and kept none: {limit - 2} times zero_std_0.0, 2 times zero_std_1.0. It keeps a prompt "
        "only if the rewards of its responses differ: check the reward and the labels, use easier "
        "or harder prompts, more rollout.samplesPerPrompt or a higher "
        "rollout.sampling.temperature, or leave the filter out"
    )
    assert one.lease(count=1) == [], "nothing more is burnt"
    assert one.counters["groups_filtered"] == 0, "they wait for a start with other settings"
    one.restart()
    assert one.buffer.dead_end() == ""
    assert ids(one.lease(count=9)) == [0, 1, 2, 3]
    one.check()


def test_one_group_that_the_filter_keeps_is_enough_to_go_on(house: Make) -> None:
    one = house(rows=50, rollout__dynamicFilter="my.module.keep", trainer__steps=9)
    limit = filter_limit(4)
    for _ in range(2):
        for number in range(limit - 1):
            (leased,) = one.lease(count=1)
            group = make_group(leased.prompt)
            reason = PROMPT_TOO_LONG if number % 100 == 0 else "too easy"
            group.samples[0].metadata_json = f'{{"filtered": "{reason}"}}'
            one.buffer.submit(group.SerializeToString())
        one.submit(one.lease(count=1)[0])
    assert one.buffer.dead_end() == ""
    assert len(one.buffer.memory.dropped) == 0


def test_a_custom_filter_that_keeps_nothing_is_named(house: Make) -> None:
    one = house(rollout__dynamicFilter="my.module.keep")
    for _ in range(filter_limit(4)):
        group = make_group(one.lease(count=1)[0].prompt)
        group.samples[0].metadata_json = '{"filtered": "too easy"}'
        one.buffer.submit(group.SerializeToString())
    assert one.buffer.dead_end() == (
        "the dynamic filter (rollout.dynamicFilter: my.module.keep) dropped the last 1024 groups "
        "and kept none: 1024 times too easy. Look at what it expects of a group, or leave it out"
    )


def test_prompts_that_are_too_long_are_not_blamed_on_the_filter(house: Make) -> None:
    one = house(rows=2000, rollout__dynamicFilter="nonzero_std")
    for _ in range(filter_limit(4)):
        group = make_group(one.lease(count=1)[0].prompt)
        group.samples[0].metadata_json = f'{{"filtered": "{PROMPT_TOO_LONG}"}}'
        one.buffer.submit(group.SerializeToString())
    assert one.buffer.dead_end() == ""
    assert "filter" not in one.stats.waiting_for


def test_a_group_that_went_back_may_return_a_partial_response(house: Make) -> None:
    """The reason for which it failed before is no number of tokens."""
    one = house(rows=200)
    fail(one, barren_limit(4), "reward raised ValueError")
    one.restart()
    (leased,) = one.lease(count=1)
    partial = make_sample(0, status=common.SAMPLE_STATUS_ABORTED, reward=None, response=3)
    assert one.give_back(leased, [partial]) == (True, "")


def test_no_prompt_of_an_epoch_fits(house: Make) -> None:
    one = house(rows=6, rollout__batchSize=6)
    for _ in range(6):
        group = one.lease(count=1)[0]
        message = common.SampleGroup(
            prompt=group.prompt, samples=[common.Sample(index=i, status=FAILED) for i in (0, 1)]
        )
        message.samples[0].error = "the prompt has 9 tokens, at most 8 fit"
        message.samples[0].metadata_json = '{"filtered": "prompt_too_long"}'
        one.submit_group(message)
    assert (
        one.buffer.dead_end()
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
