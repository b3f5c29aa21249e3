"""Signs of a sick run in its metrics, and the words that people are told."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.telemetry import health

WELL: dict[str, Any] = {
    "rollout/raw_reward": 0.5,
    "rollout/zero_std/ratio": 0.3,
    "rollout/truncated_ratio": 0.1,
    "rollout/failed_ratio": 0.0,
    "train/entropy_loss": 0.8,
    "train/ppo_kl": 0.0,
    "train/kl_loss": 0.01,
    "train/grad_norm": 0.4,
    "train/train_rollout_logprob_abs_diff": 0.01,
}


def steps(count: int, first: int = 1, /, **changes: Any) -> list[dict[str, Any]]:
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    return [WELL | named | {"step": first + i} for i in range(count)]


ZERO, REWARD, ENTROPY = "rollout/zero_std/ratio", "rollout/raw_reward", "train/entropy_loss"
TEACHER = "train/opd_reverse_kl"
MFU, TRAINING, SIZE = "perf/mfu", "perf/actor_train_time", "perf/micro_batch_tokens"
BUSY, WAITING, STEP = "rollout/worker_busy", "perf/train_wait_time", "perf/step_time"
TAIL, LATE = "rollout/tail_time", "perf/train_wait_late_time"
SLOW, FAST, WHICH = (
    "rollout/engine_latency/max",
    "rollout/engine_latency/p25",
    "rollout/slowest_engine",
)
UPDATE, IN_TURN = "perf/update_weights_time", "perf/update_weights/engines_in_turn"
APART = "train/train_rollout_logprob_abs_diff"
SAME_WEIGHTS = f"{APART}_on_policy"
OLD_CACHE = "rollout/old_cache_ratio"


@pytest.mark.parametrize(
    ("history", "kind", "words"),
    [
        (
            steps(1, **{"train/deterministic": 1.0, SAME_WEIGHTS: 1e-7}),
            "not deterministic",
            "need the same torch and Triton",
        ),
        (steps(10, **{ZERO: 1.0, REWARD: 0.0}), "equal rewards", "equal for 10 steps (reward 0)"),
        (
            steps(10) + steps(3, 11, **{ENTROPY: 0.03}),
            "entropy collapse",
            "entropy has collapsed to 0.03",
        ),
        (steps(10, **{ENTROPY: 1e-5}), "entropy collapse", "algorithm.entropyCoef"),
        (steps(1, **{"train/ppo_kl": 0.3}), "KL explosion", "ppo_kl is 0.3"),
        (steps(1, **{"train/ppo_kl": -0.3}), "KL explosion", "ppo_kl is 0.3"),
        (steps(1, **{"train/kl_loss": 2.5}), "KL explosion", "KL to the reference is 2.5"),
        (
            steps(3, **{APART: 0.2}),
            "log-prob mismatch",
            "no token was sampled with the weights that are trained",
        ),
        (
            steps(3, **{APART: 0.2, SAME_WEIGHTS: 0.2}),
            "log-prob mismatch",
            "0.2 on average, also with the same weights: they compute the model differently",
        ),
        (
            steps(3, **{APART: 0.2, SAME_WEIGHTS: 0.2, OLD_CACHE: 0.4}),
            "log-prob mismatch",
            "0.2 on average, also with the same weights, and 40% of the samples continued with a "
            "cache that older weights had computed (weightSync.pauseMode: in_place)",
        ),
        (
            steps(3, **{APART: 0.08, SAME_WEIGHTS: 0.01}),
            "old samples",
            "by 0.08 a token since its samples were made (0.01",
        ),
        (
            steps(3, **{"rollout/truncated_ratio": 0.6}),
            "truncation",
            "60% of the responses are cut off",
        ),
        (
            steps(3, **{"rollout/truncated_ratio": 0.6, "multi_turn/turns/mean": 4.0}),
            "truncation",
            "60% of the episodes end with a turn that was cut off",
        ),
        (steps(3, **{"rollout/failed_ratio": 0.25}), "failures", "25% of the samples fail"),
        (
            steps(10) + steps(1, 11, **{"train/grad_norm": 40.0}),
            "gradient spike",
            "jumped to 40 from the usual 0.4",
        ),
        (
            steps(8, **{TEACHER: 0.6}) + steps(2, 9, **{TEACHER: 1.4}),
            "teacher left",
            "has grown from 0.6 to 1.4",
        ),
        (
            steps(1, **{"train/loss": float("nan")}),
            "not finite",
            "train/loss is not a finite number",
        ),
        (
            steps(8, **{MFU: 0.06, TRAINING: 4.2, "perf/gpu_memory/training_gib": 11.9}),
            "small kernels",
            "takes 4.2 s a step and uses 6.0% of the GPUs' arithmetic and 12 GiB of memory. Try a",
        ),
        (
            steps(8, **{MFU: 0.06, TRAINING: 4.2, SIZE: 32768.0}),
            "small kernels",
            "arithmetic, with micro-batches that have grown to 32,768 tokens. Try a higher trainer",
        ),
        (
            steps(8, **{BUSY: 0.93, WAITING: 4.3, STEP: 5.0}),
            "busy worker",
            "compute for 93% of the time, on one core each, and the trainer waits for 86% of a",
        ),
        (
            steps(8, **{TAIL: 4.0, STEP: 8.0}),
            "long tail",
            "waits 50% of its time for the last quarter of a batch's responses, while the engines "
            "are nearly idle. Try rollout.mode: async",
        ),
        (
            steps(8, **{TAIL: 4.0, STEP: 8.0, "perf/wake_up_time": 0.1}),
            "long tail",
            "Try rollout.overSampling",
        ),
        (
            steps(11, **{LATE: 0.0, STEP: 0.6}) + steps(4, 12, **{LATE: 5.0, STEP: 6.0}),
            "late groups",
            "steps wait 72% of their time for a few groups that would be too old for the next "
            "batch: rollout.maxStaleness applies to every sample. Try a larger one",
        ),
        (
            steps(8, **{UPDATE: 2.0, STEP: 10.0, IN_TURN: 8.0}),
            "weights in turn",
            "weight updates take 20% of the time: a trainer rank sends to 8 engines, one after "
            "another. Try weightSync.fanOut: chain",
        ),
        (
            steps(6, **{SLOW: 0.036, FAST: 0.02, WHICH: 5.0})
            + steps(4, 7, **{SLOW: 0.036, FAST: 0.02, WHICH: 3.0}),
            "slow engine",
            "the engine of rollout-3 takes 1.8 times as long for a token as the faster ones "
            "(36 ms), for 5 steps: synchronous steps wait for it",
        ),
    ],
    ids=[
        "deterministic, and yet apart",
        "equal rewards",
        "entropy falls",
        "entropy gone",
        "ppo_kl",
        "negative ppo_kl",
        "kl_loss",
        "other weights",
        "same weights too",
        "same weights, and an old cache",
        "old samples",
        "truncation",
        "truncated turns",
        "failures",
        "gradient spike",
        "teacher left",
        "nan",
        "small kernels",
        "small kernels of grown micro-batches",
        "busy worker",
        "long tail",
        "long tail on shared GPUs",
        "late groups",
        "weights to many engines",
        "a slow engine",
    ],
)
def test_an_unhealthy_run_causes_a_warning(
    history: list[dict[str, Any]], kind: str, words: str
) -> None:
    [warning] = health.warnings(history)
    assert (warning.kind, warning.active) == (kind, True)
    assert warning.last_step == history[-1]["step"]
    assert words in warning.text


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{}],
        steps(40),
        steps(9, **{ZERO: 1.0}),
        steps(30, **{ZERO: 1.0, "step": 0})[:9] + steps(1, 10, **{ZERO: 0.99}),
        steps(10) + steps(10, 11, **{ENTROPY: 0.01, REWARD: 1.0}),
        steps(20, **{ENTROPY: 0.05}),
        steps(3, **{APART: 0.08}),
        steps(3, **{APART: 0.04, SAME_WEIGHTS: 0.01}),
        steps(3, **{APART: 0.2, SAME_WEIGHTS: 0.01, "train/tis": 1.0}),
        steps(3, **{APART: 0.2, SAME_WEIGHTS: 0.01, "train/ppo_kl": 0.05}),
        steps(3, **{APART: 0.2, SAME_WEIGHTS: 0.2, OLD_CACHE: 0.4, "train/tis": 1.0}),
        [
            record | {"attempt": attempt}
            for attempt, slow in ((1, 5), (2, 5))
            for record in steps(slow, **{MFU: 0.02, TRAINING: 9.0})
            + steps(3, slow + 1, **{MFU: 0.4, TRAINING: 1.5})
        ],
        steps(20, **{ENTROPY: 1e-5, TEACHER: 0.1}),
        steps(8, **{TEACHER: 0.01}) + steps(3, 9, **{TEACHER: 0.4}),
        steps(8, **{TEACHER: 0.9}) + steps(3, 9, **{TEACHER: 1.7}),
        steps(2, **{"rollout/truncated_ratio": 0.9}) + steps(1, 3),
        steps(40, **{"rollout/truncated_ratio": 0.5}),
        steps(40, **{"rollout/truncated_ratio": 1.0, "rollout/response_len/max": 1.0}),
        steps(10, **{"train/grad_norm": 0.01}) + steps(1, 11, **{"train/grad_norm": 0.9}),
        steps(1, **{"train/grad_norm": 300.0}),
        steps(7, **{MFU: 0.06, TRAINING: 4.2}) + steps(1, 8, **{MFU: 0.11, TRAINING: 4.2}),
        steps(14, **{MFU: 0.01, TRAINING: 0.9}),
        steps(14, **{TRAINING: 4.2}),
        steps(14, **{MFU: 0.06, TRAINING: 4.2, SIZE: 16384.0}),
        steps(14, **{BUSY: 0.7, WAITING: 4.3, STEP: 5.0}),
        steps(14, **{BUSY: 0.93, WAITING: 2.0, STEP: 5.0}),
        steps(7, **{BUSY: 0.93, WAITING: 4.3, STEP: 5.0}) + steps(3, 8),
        steps(7, **{TAIL: 4.0, STEP: 8.0}) + steps(1, 8, **{TAIL: 2.0, STEP: 8.0}),
        steps(7, **{TAIL: 4.0, STEP: 8.0}),
        steps(14, **{TAIL: 0.0, STEP: 8.0}),
        steps(14, **{LATE: 5.0, STEP: 6.0}),
        steps(20, **{LATE: 1.5, STEP: 6.0}),
        steps(14, **{UPDATE: 2.0, STEP: 10.0, IN_TURN: 2.0}),
        steps(14, **{UPDATE: 2.0, STEP: 10.0, IN_TURN: 0.0}),
        steps(14, **{UPDATE: 0.9, STEP: 10.0, IN_TURN: 8.0}),
        steps(7, **{UPDATE: 2.0, STEP: 10.0, IN_TURN: 8.0}),
        steps(14, **{SLOW: 0.029, FAST: 0.02, WHICH: 3.0}),
        steps(8, **{SLOW: 0.09, FAST: 0.02, WHICH: 3.0})
        + steps(3, 9, **{SLOW: 0.09, FAST: 0.02, WHICH: 2.0}),
    ],
    ids=[
        "no steps",
        "empty step",
        "well",
        "nine steps of equal rewards",
        "one step told apart",
        "low entropy, high reward",
        "entropy at 0.05",
        "off by 0.08",
        "off by 0.04",
        "corrected by tis",
        "moved by ppo",
        "an old cache, corrected by tis",
        "slow at the start of each attempt",
        "low entropy under a teacher",
        "teacher was close",
        "teacher left by less than twice",
        "truncated and better",
        "half truncated",
        "answers of one token",
        "small gradients",
        "first gradient",
        "slow at first",
        "a moment of training",
        "no GPU",
        "micro-batches that grew as far as they can",
        "workers with room",
        "a trainer that hardly waits",
        "workers that were busy for two steps",
        "a step with a short tail",
        "two settled steps with a long tail",
        "asynchronous mode",
        "fourteen steps with late groups",
        "late groups for a quarter of the time",
        "weights to two engines of a rank",
        "weights over a chain, or by a directory",
        "quick weights to many engines",
        "two updates to many engines",
        "engines that are nearly equal",
        "a slow engine that is another one each time",
    ],
)
def test_a_run_that_may_be_healthy_causes_no_warning(history: list[dict[str, Any]]) -> None:
    assert health.warnings(history) == []


def test_supervised_fine_tuning_may_lose_entropy() -> None:
    """In supervised fine-tuning the entropy falls, and no sample is generated or judged."""
    course = [
        {"step": i, "train/loss": 2.0 / i, "train/entropy_loss": 2.0 / i**2, "train/grad_norm": 0.4}
        for i in range(1, 60)
    ]
    assert health.warnings(course) == []


CUT_OFF = "rollout/truncated_ratio"


def test_a_warning_that_no_longer_holds_is_history() -> None:
    course = steps(40, **{CUT_OFF: 0.99}) + steps(80, 41, **{CUT_OFF: 0.0})
    [warning] = health.warnings(course)
    assert (warning.active, warning.first_step, warning.last_step) == (False, 3, 40)
    assert warning.sentence().startswith("steps 3-40: 99% of the responses are cut off")


def test_active_warnings_come_first_with_current_values() -> None:
    course = (
        steps(3, **{CUT_OFF: 0.99})
        + steps(3, 4)
        + steps(3, 7, **{"rollout/failed_ratio": 0.5})
        + steps(1, 10, **{"rollout/failed_ratio": 0.3})
    )
    assert [
        (warning.kind, warning.active, warning.steps) for warning in health.warnings(course)
    ] == [
        ("failures", True, "steps 9-10"),
        ("truncation", False, "step 3"),
    ]
    assert health.warnings(course)[0].text.startswith("30% of the samples fail")


def test_a_problem_that_returns_is_the_same_warning() -> None:
    course = steps(3, **{CUT_OFF: 0.9}) + steps(9, 4) + steps(3, 13, **{CUT_OFF: 0.8})
    [warning] = health.warnings(course)
    assert (warning.active, warning.first_step, warning.last_step) == (True, 3, 15)


@pytest.mark.parametrize(
    ("usual", "now", "kind"),
    [
        ({ENTROPY: 0.8}, {ENTROPY: 0.03}, "entropy collapse"),
        ({TEACHER: 0.6}, {TEACHER: 1.4}, "teacher left"),
        ({"train/grad_norm": 0.4}, {"train/grad_norm": 40.0}, "gradient spike"),
    ],
    ids=["entropy", "teacher", "gradient"],
)
def test_a_lasting_problem_does_not_become_the_normal_state(
    usual: dict[str, float], now: dict[str, float], kind: str
) -> None:
    """The rules that compare with earlier steps see only the last 20."""
    course = steps(20, **usual) + steps(100, 21, **now)
    [warning] = health.warnings(course)
    assert (warning.kind, warning.active, warning.last_step) == (kind, True, 120)
    [warning] = health.warnings(course + steps(20, 121, **usual))
    assert not warning.active
    assert warning.last_step is not None
    assert warning.last_step <= 122


def test_a_kind_is_reported_once() -> None:
    monitor = health.HealthMonitor()
    kinds = [
        [warning.kind for warning in monitor.see(s)] for s in steps(6, **{"train/ppo_kl": 1.0})
    ]
    assert kinds == [["KL explosion"], [], [], [], [], []]


def test_warnings_of_earlier_steps_are_not_reported_again() -> None:
    sick = steps(6, **{"train/ppo_kl": 1.0})
    assert health.HealthMonitor(sick[:3]).see(sick[3]) == []


def test_wasted_groups_are_reported_once() -> None:
    harvest = health.StallMonitor(batch_size=8)
    assert harvest.see(0, 0, 0) is None
    assert harvest.see(0, 31, 0) is None
    warning = harvest.see(0, 32, 0)
    assert warning is not None
    assert warning.text.startswith("32 groups failed without a step: ")
    assert "rollout log" in warning.text
    assert harvest.see(0, 64, 0) is None
    assert harvest.warning == warning
    assert harvest.see(1, 70, 0) is None
    assert harvest.warning is not None
    assert not harvest.warning.active, "a step was made after all"


def test_groups_are_counted_from_the_last_step_on() -> None:
    harvest = health.StallMonitor(batch_size=8)
    assert harvest.see(3, 500, 500) is None
    assert harvest.see(4, 510, 520) is None
    warning = harvest.see(4, 512, 550)
    assert warning is not None
    assert warning.text.startswith("2 groups failed and 30 groups were filtered without a step: ")
    assert "rollout.dynamicFilter" in warning.text
