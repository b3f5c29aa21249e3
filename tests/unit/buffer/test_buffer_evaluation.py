"""Evaluation rounds."""

from collections.abc import Callable

import pytest

from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.rules.admission import MAX_FAILURES
from sluice_buffer.serving.readback import evaluations, example_sizes, failures
from sluice_buffer.state.storage import value_key
from sluice_buffer.transitions.submits import SubmitOutcome
from tests.unit.buffer.buffer_tools import LocalBuffer, make_group

MakeBuffer = Callable[..., LocalBuffer]
EVERY_2 = {"everySteps": 2, "samplesPerPrompt": 2, "passAtK": [1, 2]}


def evaluate(buffer: LocalBuffer, version: int, **kwargs: object) -> list[int]:
    """Finish the open round; the ids of its groups."""
    leased = buffer.lease("rollout-9", 3, version=version)
    assert {g.prompt.purpose for g in leased} == {pb.PURPOSE_EVALUATE}
    for group in leased:
        assert buffer.submit(group, version=version, **kwargs).outcome is SubmitOutcome.STORED
    return [g.prompt.group_id for g in leased]


def test_evaluation_comes_first_and_holds_a_sync_batch_back(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(evaluation=dict(EVERY_2))
    leased = buffer.lease(count=7)
    assert [(g.prompt.purpose, g.prompt.group_id, g.prompt.version) for g in leased[:3]] == [
        (pb.PURPOSE_EVALUATE, i, 0) for i in range(3)
    ]
    for group in leased[3:]:
        buffer.submit(group)
    assert (
        buffer.core.take(1, 1)
        == "evaluation of version 0: 0 of 3 groups finished, leased by rollout-0"
    )
    for group in leased[:3]:
        buffer.submit(group)
    assert buffer.core.take(1, 1) is None
    assert buffer.stats.started == 4


def test_rounds_are_opened_every_n_steps_and_at_the_end(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(evaluation=dict(EVERY_2, beforeTrain=False))
    opened = []
    for step in range(1, 6):
        buffer.fill(4, version=step - 1)
        buffer.step(step)
        if buffer.core.memory.rounds:
            opened += list(buffer.core.memory.rounds)
            evaluate(buffer, step)
    assert opened == [2, 4, 5]
    assert not buffer.core.over
    buffer.core.commit_checkpoint(5, 1)
    assert buffer.core.over


def test_results_have_metrics_and_examples_and_survive_a_restart(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(evaluation=dict(EVERY_2))
    leased = buffer.lease(count=3)
    buffer.submit(leased[0])
    buffer.restart()
    buffer.submit(leased[1], reward=1.0)
    assert evaluations(buffer.core, -1) == []
    buffer.clock.now += 7
    buffer.submit(leased[2], status=pb.SAMPLE_STATUS_FAILED)
    buffer.restart()
    (evaluation,) = evaluations(buffer.core, -1)
    assert (evaluation.version, evaluation.dataset, evaluation.seconds) == (0, "held-out", 7.0)
    assert evaluation.metrics["reward"] == pytest.approx(0.5)
    assert evaluation.metrics["pass@1"] == pytest.approx(0.5)
    assert evaluation.metrics["failed_ratio"] == pytest.approx(1 / 3)
    sizes = example_sizes(buffer.core, evaluation.version, evaluation.dataset)
    assert [key.group_id for key, _ in sizes] == [0, 1, 2]
    stored = [buffer.core.storage.value("examples", value_key(key)) for key, _ in sizes]
    assert [len(value or b"") for value in stored] == [size for _, size in sizes]
    assert buffer.stats.evaluation == {"eval/held-out": 0.5}
    assert buffer.submit(leased[0]).outcome is SubmitOutcome.DUPLICATE
    assert evaluations(buffer.core, 0) == []


def test_the_majority_votes_where_rewards_tell_of_answers(make_buffer: MakeBuffer) -> None:
    """Each group has two right answers and a wrong one, and a restart loses none of them."""
    buffer = make_buffer(evaluation={**EVERY_2, "samplesPerPrompt": 3, "passAtK": [1, 3]})
    for leased in buffer.lease(count=3):
        group = make_group(leased.prompt, samples=3)
        for sample, answer, reward in zip(group.samples, (5.0, 9.0, 9.0), (0, 1, 1), strict=True):
            sample.reward = reward
            sample.reward_parts["pred"] = answer
        assert buffer.submit_group(group).outcome is SubmitOutcome.STORED
        buffer.restart()
    (evaluation,) = evaluations(buffer.core, -1)
    assert evaluation.metrics["maj@3"] == 1
    assert evaluation.metrics["pass^3"] == 0


def test_a_group_that_cannot_be_finished_counts_as_failed(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(evaluation=dict(EVERY_2))
    for _ in range(MAX_FAILURES):
        buffer.give_back(buffer.lease(count=1)[0], failure="EngineError: engine answered 500")
    for group in buffer.lease(count=2):
        buffer.submit(group, reward=1.0)
    (failure,) = failures(buffer.core.storage, buffer.core.prompts, 0)
    assert (failure.version, failure.dataset, failure.row) == (0, "held-out", 0)
    (evaluation,) = evaluations(buffer.core, -1)
    assert evaluation.metrics["reward"] == pytest.approx(2 / 3)
    assert evaluation.metrics["failed_ratio"] == pytest.approx(1 / 3)


def test_after_a_rewind_later_rounds_are_made_again(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(evaluation=dict(EVERY_2))
    evaluate(buffer, 0)
    for step in (1, 2):
        buffer.fill(4, version=step - 1)
        buffer.step(step)
    old = buffer.lease(count=3, version=2)
    buffer.submit(old[0], version=2)
    assert buffer.core.rewind(1, 2) == 1
    assert buffer.core.memory.rounds == {}
    buffer.restart()
    assert buffer.submit(old[1], version=2).outcome is SubmitOutcome.STALE
    assert buffer.core.take(2, 2) is None
    buffer.core.commit(2, 2, 2, {})
    assert evaluate(buffer, 2) == [0, 1, 2]
    assert buffer.submit(old[2], version=2).outcome is SubmitOutcome.DUPLICATE
    assert [e.version for e in evaluations(buffer.core, -1)] == [0, 2]
    assert buffer.core.rewind(0, 3) == 2
    assert [e.version for e in evaluations(buffer.core, -1)] == [0]


def test_async_training_goes_on_while_a_round_is_open(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(evaluation=dict(EVERY_2), rollout__mode="async", rollout__maxStaleness=1)
    leased = buffer.lease(count=7)
    for group in leased[3:]:
        buffer.submit(group)
    assert buffer.core.take(1, 1) is None


def test_an_engine_with_older_weights_gets_no_evaluation(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(
        evaluation=dict(EVERY_2, beforeTrain=False), rollout__mode="async", rollout__maxStaleness=1
    )
    for step in (1, 2):
        buffer.fill(4, version=step - 1)
        buffer.step(step)
    assert {g.prompt.purpose for g in buffer.lease(count=9, version=1)} == {pb.PURPOSE_TRAIN}
    assert len(buffer.lease(count=3, version=2)) == 3


def test_the_last_round_comes_when_the_prompts_end_early(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(
        evaluation=dict(EVERY_2, everySteps=100, beforeTrain=False), rows=8, trainer={"epochs": 1},
        rollout__dynamicFilter="nonzero_std",
    )  # fmt: skip
    buffer.fill(4)
    buffer.step(1)
    buffer.fill(4, version=1, reward=1.0)
    assert list(buffer.core.memory.rounds) == [1]


def test_examples_are_kept_for_the_newest_rounds_only(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(evaluation=dict(EVERY_2, everySteps=1))
    evaluate(buffer, 0)
    for step in range(1, 5):
        buffer.fill(4, version=step - 1)
        buffer.step(step)
        evaluate(buffer, step)
    assert [e.examples for e in evaluations(buffer.core, -1)] == [0, 0, 3, 3, 3]
    buffer.core.commit_checkpoint(4, 1)
    buffer.restart()
    assert [e.examples for e in evaluations(buffer.core, -1)] == [0, 0, 3, 3, 3]
    assert buffer.core.memory.stored == sum(1 for _ in buffer.core.storage.scan("examples")) * (
        4096 + 256
    )
