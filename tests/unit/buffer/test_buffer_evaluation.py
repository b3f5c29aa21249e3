"""Evaluation rounds."""

from collections.abc import Callable

import pytest

from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.rules.admission import MAX_FAILURES
from sluice_buffer.serving.readback import evaluations, example_sizes, failures
from sluice_buffer.state.memory import value_key
from sluice_buffer.transitions.submits import SubmitOutcome
from tests.unit.buffer.buffer_tools import House, make_group

Make = Callable[..., House]
EVERY_2 = {"everySteps": 2, "samplesPerPrompt": 2, "passAtK": [1, 2]}


def evaluate(house: House, version: int, **kwargs: object) -> list[int]:
    """Finish the open round; the ids of its groups."""
    leased = house.lease("rollout-9", 3, version=version)
    assert {g.prompt.purpose for g in leased} == {pb.PURPOSE_EVALUATE}
    for group in leased:
        assert house.submit(group, version=version, **kwargs).outcome is SubmitOutcome.STORED
    return [g.prompt.group_id for g in leased]


def test_evaluation_comes_first_and_holds_a_sync_batch_back(house: Make) -> None:
    one = house(evaluation=dict(EVERY_2))
    leased = one.lease(count=7)
    assert [(g.prompt.purpose, g.prompt.group_id, g.prompt.version) for g in leased[:3]] == [
        (pb.PURPOSE_EVALUATE, i, 0) for i in range(3)
    ]
    for group in leased[3:]:
        one.submit(group)
    assert (
        one.buffer.take(1, 1)
        == "evaluation of version 0: 0 of 3 groups finished, leased by rollout-0"
    )
    for group in leased[:3]:
        one.submit(group)
    assert one.buffer.take(1, 1) is None
    assert one.stats.started == 4


def test_rounds_are_opened_every_n_steps_and_at_the_end(house: Make) -> None:
    one = house(evaluation=dict(EVERY_2, beforeTrain=False))
    opened = []
    for step in range(1, 6):
        one.fill(4, version=step - 1)
        one.step(step)
        if one.buffer.memory.rounds:
            opened += list(one.buffer.memory.rounds)
            evaluate(one, step)
    assert opened == [2, 4, 5]
    assert not one.buffer.over
    one.buffer.commit_checkpoint(5, 1)
    assert one.buffer.over


def test_results_have_metrics_and_examples_and_survive_a_restart(house: Make) -> None:
    one = house(evaluation=dict(EVERY_2))
    leased = one.lease(count=3)
    one.submit(leased[0])
    one.restart()
    one.submit(leased[1], reward=1.0)
    assert evaluations(one.buffer, -1) == []
    one.clock.now += 7
    one.submit(leased[2], status=pb.SAMPLE_STATUS_FAILED)
    one.restart()
    (evaluation,) = evaluations(one.buffer, -1)
    assert (evaluation.version, evaluation.dataset, evaluation.seconds) == (0, "held-out", 7.0)
    assert evaluation.metrics["reward"] == pytest.approx(0.5)
    assert evaluation.metrics["pass@1"] == pytest.approx(0.5)
    assert evaluation.metrics["failed_ratio"] == pytest.approx(1 / 3)
    sizes = example_sizes(one.buffer, evaluation.version, evaluation.dataset)
    assert [key.group_id for key, _ in sizes] == [0, 1, 2]
    stored = [one.buffer.storage.value("examples", value_key(key)) for key, _ in sizes]
    assert [len(value or b"") for value in stored] == [size for _, size in sizes]
    assert one.stats.evaluation == {"eval/held-out": 0.5}
    assert one.submit(leased[0]).outcome is SubmitOutcome.DUPLICATE
    assert evaluations(one.buffer, 0) == []


def test_the_majority_votes_where_rewards_tell_of_answers(house: Make) -> None:
    """Each group: two right answers and one wrong one, of which nothing is lost by a restart."""
    one = house(evaluation={**EVERY_2, "samplesPerPrompt": 3, "passAtK": [1, 3]})
    for leased in one.lease(count=3):
        group = make_group(leased.prompt, samples=3)
        for sample, answer, reward in zip(group.samples, (5.0, 9.0, 9.0), (0, 1, 1), strict=True):
            sample.reward = reward
            sample.reward_parts["pred"] = answer
        assert one.submit_group(group).outcome is SubmitOutcome.STORED
        one.restart()
    (evaluation,) = evaluations(one.buffer, -1)
    assert evaluation.metrics["maj@3"] == 1
    assert evaluation.metrics["pass^3"] == 0


def test_a_group_that_cannot_be_finished_counts_as_failed(house: Make) -> None:
    one = house(evaluation=dict(EVERY_2))
    for _ in range(MAX_FAILURES):
        one.give_back(one.lease(count=1)[0], failure="EngineError: engine answered 500")
    for group in one.lease(count=2):
        one.submit(group, reward=1.0)
    (failure,) = failures(one.buffer.storage, one.buffer.prompts, 0)
    assert (failure.version, failure.dataset, failure.row) == (0, "held-out", 0)
    (evaluation,) = evaluations(one.buffer, -1)
    assert evaluation.metrics["reward"] == pytest.approx(2 / 3)
    assert evaluation.metrics["failed_ratio"] == pytest.approx(1 / 3)


def test_after_a_rewind_later_rounds_are_made_again(house: Make) -> None:
    one = house(evaluation=dict(EVERY_2))
    evaluate(one, 0)
    for step in (1, 2):
        one.fill(4, version=step - 1)
        one.step(step)
    old = one.lease(count=3, version=2)
    one.submit(old[0], version=2)
    assert one.buffer.rewind(1, 2) == 1
    assert one.buffer.memory.rounds == {}
    one.restart()
    assert one.submit(old[1], version=2).outcome is SubmitOutcome.STALE
    assert one.buffer.take(2, 2) is None
    one.buffer.commit(2, 2, 2, {})
    assert evaluate(one, 2) == [0, 1, 2]
    assert one.submit(old[2], version=2).outcome is SubmitOutcome.DUPLICATE
    assert [e.version for e in evaluations(one.buffer, -1)] == [0, 2]
    assert one.buffer.rewind(0, 3) == 2
    assert [e.version for e in evaluations(one.buffer, -1)] == [0]


def test_async_training_goes_on_while_a_round_is_open(house: Make) -> None:
    one = house(evaluation=dict(EVERY_2), rollout__mode="async", rollout__maxStaleness=1)
    leased = one.lease(count=7)
    for group in leased[3:]:
        one.submit(group)
    assert one.buffer.take(1, 1) is None


def test_an_engine_with_older_weights_gets_no_evaluation(house: Make) -> None:
    one = house(
        evaluation=dict(EVERY_2, beforeTrain=False), rollout__mode="async", rollout__maxStaleness=1
    )
    for step in (1, 2):
        one.fill(4, version=step - 1)
        one.step(step)
    assert {g.prompt.purpose for g in one.lease(count=9, version=1)} == {pb.PURPOSE_TRAIN}
    assert len(one.lease(count=3, version=2)) == 3


def test_the_last_round_comes_when_the_prompts_end_early(house: Make) -> None:
    one = house(
        evaluation=dict(EVERY_2, everySteps=100, beforeTrain=False), rows=8, trainer={"epochs": 1},
        rollout__dynamicFilter="nonzero_std",
    )  # fmt: skip
    one.fill(4)
    one.step(1)
    one.fill(4, version=1, reward=1.0)
    assert list(one.buffer.memory.rounds) == [1]


def test_examples_are_kept_for_the_newest_rounds_only(house: Make) -> None:
    one = house(evaluation=dict(EVERY_2, everySteps=1))
    evaluate(one, 0)
    for step in range(1, 5):
        one.fill(4, version=step - 1)
        one.step(step)
        evaluate(one, step)
    assert [e.examples for e in evaluations(one.buffer, -1)] == [0, 0, 3, 3, 3]
    one.buffer.commit_checkpoint(4, 1)
    one.restart()
    assert [e.examples for e in evaluations(one.buffer, -1)] == [0, 0, 3, 3, 3]
    assert one.buffer.memory.stored == sum(1 for _ in one.buffer.storage.scan("examples")) * (
        4096 + 256
    )
