"""The planner's advice, from device seconds."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api import GoodputStatus, RLJobSpec, RLJobStatus
from sluice.telemetry.planner import Split, Work, advice_for, advise, splits, work_of


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
STATES = {
    "rollout/starting": 600.0,
    "rollout/generating": 240.0,
    "rollout/idle": 360.0,
    "trainer/starting": 100.0,
    "trainer/training": 180.0,
    "trainer/waiting": 10.0,
    "trainer/publishing": 10.0,
}
"""Ten steps on six engines and two trainer GPUs: 24 device seconds of generation, 18 of training,
0.5 s besides."""


def test_a_steps_work_is_what_was_done_not_what_was_waited() -> None:
    work = work_of(STATES, 10, Split(6, 2, overlapped=True))
    assert work == Work(generation=24.0, training=18.0, rest=0.5)
    assert work.seconds(Split(6, 2, overlapped=True)) == 9.5
    assert work.seconds(Split(6, 2, overlapped=False)) == 4 + 9.5


def test_a_jobs_status_has_all_that_advice_needs() -> None:
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
def test_too_little_is_no_advice(steps: int, states: dict[str, float]) -> None:
    assert advise(states, steps, spec(rollout=ASYNC)) is None


def test_idle_engines_are_to_become_trainers() -> None:
    advice = advise(STATES, 10, spec(rollout=ASYNC))
    assert advice is not None
    assert advice.best == Split(4, 4, overlapped=True), "24 / 4 = 6 s; 18 / 4 + 0.5 = 5 s"
    assert advice.speedup == pytest.approx(9.5 / 6)
    assert advice.text() == (
        "engines wait 60%, the trainer 5%: 2 engine GPUs fewer, 2 trainer GPUs more gives about "
        "1.6x"
    )


def test_a_synchronous_job_may_gain_by_overlap() -> None:
    advice = advise(STATES, 10, spec())
    assert advice is not None
    assert advice.best == Split(4, 4, overlapped=True)
    assert "rollout.mode: async" in advice.text()


def test_older_samples_are_not_taken_for_little() -> None:
    """Generation is next to nothing: overlapped it would save 1 %."""
    states = STATES | {"rollout/generating": 2.0}
    advice = advise(states, 10, spec(rollout={"replicas": 1}))
    assert advice is not None
    assert not advice.best.overlapped
    assert advice.text().endswith("no other split of these devices is 1.1 times as fast")


def test_splits_are_of_whole_engines_and_whole_models() -> None:
    now = Split(4, 4, overlapped=True)
    assert splits(now, engine_unit=2, trainer_unit=2) == [
        Split(2, 6, overlapped=True),
        Split(4, 4, overlapped=True),
        Split(6, 2, overlapped=True),
    ]
    assert splits(now, engine_unit=4, trainer_unit=4) == [now]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            {"trainer": {"gpusPerNode": 0}, "rollout": {"gpusPerReplica": 0}}, id="on CPUs"
        ),
        pytest.param(
            {"trainer": {"colocate": True}, "rollout": {"replicas": None}}, id="shared GPUs"
        ),
        pytest.param({"rollout": {"replicas": None}}, id="an unknown number of engines"),
    ],
)
def test_what_has_no_split_gets_no_advice(job: dict[str, Any]) -> None:
    assert advise(STATES, 10, spec(**job)) is None
