"""The planner's advice, from device seconds."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api import GoodputStatus, RLJobSpec, RLJobStatus
from sluice.telemetry.planner import Split, Work, advice_for, advise, one_more, splits, work_of


def spec(**changes: Any) -> RLJobSpec:
    trainer = {"gpusPerNode": 2, "steps": 100, **changes.pop("trainer", {})}
    rollout = {"gpusPerReplica": 1, "replicas": 6, **changes.pop("rollout", {})}
    return RLJobSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts": [{"path": "p"}]},
            "reward": {"type": "f1"},
            "trainer": trainer,
            "rollout": rollout,
            **changes,
        }
    )


ASYNC = {"mode": "async", "maxStaleness": 1}
# Ten steps on six engines and two trainer GPUs: 24 device seconds of generation, 18 of training,
# 0.5 s of other work.
STATES = {
    "rollout/starting": 600.0,
    "rollout/generating": 240.0,
    "rollout/idle": 360.0,
    "trainer/starting": 100.0,
    "trainer/training": 180.0,
    "trainer/waiting": 10.0,
    "trainer/publishing": 10.0,
}


def test_waiting_is_not_part_of_a_steps_work() -> None:
    work = work_of(STATES, 10, Split(6, 2, 1))
    assert work == Work(generation=24.0, training=18.0, rest=0.5)
    assert work.seconds(Split(6, 2, 1)) == 9.5
    assert work.seconds(Split(6, 2)) == 4 + 9.5


@pytest.mark.parametrize(
    ("split", "seconds"),
    [
        pytest.param(Split(1, 1), 8.0, id="synchronous: one after the other"),
        pytest.param(Split(2, 1), 7.0, id="more engines do not shorten the tail"),
        pytest.param(Split(1, 2), 7.5, id="a larger trainer"),
        pytest.param(Split(1, 1, 1), 4.0, id="two batches under way"),
        pytest.param(Split(1, 2, 8), 3.5, id="engines that are always full"),
        pytest.param(Split(4, 1, 8), 2.0, id="four of them, and the tail's own work"),
    ],
)
def test_the_tail_overlaps_with_later_batches(split: Split, seconds: float) -> None:
    work = Work(generation=2.0, training=1.0, rest=0.0, tail=5.0)
    assert work.seconds(split) == pytest.approx(seconds)


def test_batches_in_flight_bound_a_step_if_trainer_and_engines_are_equally_slow() -> None:
    work = Work(generation=2.0, training=5.0, rest=0.0, tail=5.0)
    assert [work.seconds(Split(1, 1, staleness)) for staleness in (0, 1, 2, 8)] == [12, 6, 5, 5]


def test_without_a_tail_no_staleness_is_too_small() -> None:
    work = Work(generation=3.0, training=3.0, rest=0.0)
    assert work.seconds(Split(1, 1, 1)) == work.seconds(Split(1, 1, 9)) == 3.0


def test_the_tail_is_the_time_of_one_engine() -> None:
    work = work_of(STATES | {"rollout/tail": 120.0}, 10, Split(6, 2))
    assert work == Work(generation=24.0, training=18.0, rest=0.5, tail=2.0)


def test_advice_follows_from_a_jobs_status() -> None:
    whole = {name: int(seconds) for name, seconds in STATES.items()}
    status = RLJobStatus(step=10, goodput=GoodputStatus(ratio="0.5", states=whole))
    advice = advice_for(spec(rollout=ASYNC), status)
    assert advice is not None
    assert advice == advise(STATES, 10, spec(rollout=ASYNC))
    assert advice_for(spec(rollout=ASYNC), RLJobStatus(step=10)) is None


@pytest.mark.parametrize(
    ("steps", "states"),
    [
        pytest.param(2, STATES, id="too few steps"),
        pytest.param(10, {"trainer/training": 1.0}, id="nothing generated"),
        pytest.param(10, {}, id="nothing counted"),
    ],
)
def test_too_few_steps_give_no_advice(steps: int, states: dict[str, float]) -> None:
    assert advise(states, steps, spec(rollout=ASYNC)) is None


def test_idle_engines_should_become_trainers() -> None:
    advice = advise(STATES, 10, spec(rollout=ASYNC))
    assert advice is not None
    assert advice.best == Split(4, 4, 1), "24 / 4 = 6 s; 18 / 4 + 0.5 = 5 s"
    assert advice.speedup == pytest.approx(9.5 / 6)
    assert advice.text() == (
        "engines wait 60%, the trainer 5%: 2 engine GPUs fewer, 2 trainer GPUs more gives about "
        "1.6x"
    )


def test_a_synchronous_job_may_gain_by_overlap() -> None:
    advice = advise(STATES, 10, spec())
    assert advice is not None
    assert advice.best == Split(4, 4, 1)
    assert advice.text().endswith("rollout.mode: async with maxStaleness: 1 gives about 2.2x")


# Ten synchronous steps of 7.3 s on two GPUs, most of each with the last few responses.
TAIL = {
    "rollout/generating": 15.0,
    "rollout/tail": 50.0,
    "rollout/idle": 8.0,
    "trainer/training": 7.0,
    "trainer/waiting": 65.0,
    "trainer/publishing": 1.0,
}
ON_TWO = {"trainer": {"gpusPerNode": 1}, "rollout": {"replicas": 1}}


def test_asynchronous_mode_fills_a_long_tail() -> None:
    advice = advise(TAIL, 10, spec(**ON_TWO))
    assert advice is not None
    assert advice.best == Split(1, 1, 2), (
        "two batches under way are 3.65 s a step, full engines 3.0"
    )
    assert advice.text() == (
        "engines wait 11%, the trainer 89%; engines spend 68% on the last few responses of a batch:"
        " rollout.mode: async with maxStaleness: 2 gives about 2.4x"
    )


def test_a_short_tail_is_not_mentioned() -> None:
    advice = advise(STATES | {"rollout/tail": 60.0}, 10, spec())
    assert advice is not None
    assert "responses" not in advice.text()


def test_an_asynchronous_job_keeps_its_staleness() -> None:
    job = spec(**ON_TWO | {"rollout": {"replicas": 1, **ASYNC}})
    advice = advise(TAIL | {"rollout/tail": 0.0}, 10, job)
    assert advice is not None
    assert advice.best == Split(1, 1, 1)


def test_a_small_gain_is_not_worth_older_samples() -> None:
    """Generation is very short: overlapped it would save 1 %."""
    states = STATES | {"rollout/generating": 2.0}
    advice = advise(states, 10, spec(rollout={"replicas": 1}))
    assert advice is not None
    assert not advice.best.staleness
    assert advice.text().endswith(
        "no other split of these devices is 1.1 times as fast; 1 trainer GPU more would give about "
        "1.4x"
    )


def test_engines_that_are_always_busy_need_another_engine() -> None:
    """A run of two GPUs: the trainer has waited for three quarters of its time."""
    states = {
        "rollout/generating": 274.2,
        "rollout/idle": 1.3,
        "trainer/training": 67.0,
        "trainer/waiting": 241.6,
        "trainer/publishing": 4.2,
    }
    job = spec(trainer={"gpusPerNode": 1}, rollout={"replicas": 1, **ASYNC})
    advice = advise(states, 63, job)
    assert advice is not None
    assert advice.text() == (
        "engines wait 0%, the trainer 77%; no other split of these devices is 1.1 times as fast; "
        "1 engine GPU more would give about 2.0x"
    )


@pytest.mark.parametrize(
    ("work", "units", "expected"),
    [
        pytest.param(Work(8, 2, 0), (1, 1), Split(3, 1, 1), id="an engine"),
        pytest.param(Work(2, 4, 0), (1, 1), Split(2, 2, 1), id="a trainer"),
        pytest.param(Work(8, 4, 0), (1, 1), None, id="balanced: one alone gains nothing"),
        pytest.param(Work(16, 2, 0), (8, 1), Split(10, 1, 1), id="a large engine"),
        pytest.param(Work(8, 3.5, 0), (1, 1), None, id="little"),
    ],
)
def test_only_worthwhile_changes_are_suggested(
    work: Work, units: tuple[int, int], expected: Split | None
) -> None:
    more = one_more(work, Split(2, 1, 1), engine_unit=units[0], trainer_unit=units[1])
    assert (more[0] if more else None) == expected


def test_splits_are_of_whole_engines_and_whole_models() -> None:
    now = Split(4, 4, 1)
    assert splits(now, engine_unit=2, trainer_unit=2) == [Split(2, 6, 1), now, Split(6, 2, 1)]
    assert splits(now, engine_unit=4, trainer_unit=4) == [now]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            {"trainer": {"gpusPerNode": 0}, "rollout": {"gpusPerReplica": 0}}, id="on CPUs"
        ),
        pytest.param({"trainer": {"colocate": True}, "rollout": {"replicas": 1}}, id="shared GPUs"),
        pytest.param({"rollout": {"replicas": 0}}, id="no engines"),
    ],
)
def test_jobs_without_a_split_get_no_advice(job: dict[str, Any]) -> None:
    assert advise(STATES, 10, spec(**job)) is None
