"""Figures of the report, each with a sentence that says how to read it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sluice.telemetry.headline import headline
from sluice.telemetry.report.drawing import Draw, hover, legend_above
from sluice.telemetry.report.timeline import STATES

StepRecords = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, with a text that says what it shows and what is healthy."""

    title: str
    text: str
    draw: Draw


@dataclass(frozen=True, slots=True)
class _Curves:
    """Metrics over steps. `names` maps a metric to its label."""

    title: str
    text: str
    names: Mapping[str, str]
    log: bool = False


_CURVES = (
    _Curves(
        "Pass rate",
        "Chance that at least one of k answers to a prompt is right (reward 1). If pass@1 "
        "rises and the largest k does not, the model becomes more certain of what it could do "
        "before.",
        {f"passrate/pass@{1 << i}": f"pass@{1 << i}" for i in range(11)},
    ),
    _Curves(
        "Response length",
        "Tokens per response. Length that grows without the reward is a bad sign.",
        {"rollout/response_len/mean": "mean", "rollout/response_len/max": "longest"},
    ),
    _Curves(
        "Truncated, failed and equal",
        "Shares of responses that reached their token limit, of samples that failed, and of "
        "prompts whose answers all have the same reward, so that a group estimator learns nothing.",
        {
            "rollout/truncated_ratio": "truncated",
            "rollout/failed_ratio": "failed",
            "rollout/zero_std/ratio": "prompts with equal rewards",
        },
    ),
    _Curves(
        "Entropy and gradient",
        "Mean entropy of a token in nats; near 0 the model no longer explores. Gradient norm "
        "before clipping.",
        {"train/entropy_loss": "entropy", "train/grad_norm": "gradient norm"},
    ),
    _Curves(
        "Distance of the policy",
        "KL from the policy at the batch's start and from the reference, and the share of tokens "
        "whose ratio was clipped. With one update per batch the first and the last are 0.",
        {
            "train/ppo_kl": "KL from the batch's start",
            "train/kl_loss": "KL from the reference",
            "train/pg_clipfrac": "clipped tokens",
        },
    ),
    _Curves(
        "Preferences",
        "Rewards of chosen and rejected answers, and the share of pairs in which the chosen one "
        "has the higher reward.",
        {
            "train/rewards/chosen": "chosen",
            "train/rewards/rejected": "rejected",
            "train/rewards/accuracies": "chosen is higher",
        },
    ),
    _Curves("Learning rate", "Set by trainer.optimizer.", {"train/lr-pg_0": "learning rate"}),
    _Curves(
        "Reverse KL to the teacher",
        "Distillation: nats per token.",
        {"train/opd_reverse_kl": "reverse KL"},
    ),
    _Curves(
        "Acceptance length",
        "rollout.speculative: tokens of responses for each pass that verifies proposed ones. It "
        "falls as the policy moves away from the draft; near 1 speculation costs time.",
        {"rollout/spec_accept_length": "tokens"},
    ),
    _Curves(
        "Age of the samples",
        "Mean number of steps by which the oldest weights of a sample lag behind. Bounded by "
        "rollout.maxStaleness.",
        {"rollout/policy_lag": "policy lag"},
    ),
    _Curves(
        "Trainer against engine",
        "Difference of the log-probs of the same tokens. A few hundredths are normal in bf16, and "
        "engines with rollout.precision in 8 bits differ more; a jump points to a fault in the "
        "weights or in a kernel.",
        {
            "train/train_rollout_logprob_abs_diff_max": "largest",
            "train/train_rollout_logprob_abs_diff": "mean",
            "train/train_rollout_logprob_abs_diff_on_policy": "mean, same weights",
        },
        log=True,
    ),
    _Curves(
        "Tokens per second",
        "Prompt and response tokens of a step divided by its time.",
        {"perf/tokens_per_second": "tokens per second"},
    ),
)
# Labels of the trainer's phases within a step.
_PHASES = {
    "waiting": "waiting for samples",
    "training": "training",
    "publishing": "weights to engines",
    "taking_turn": "taking turns",
    "saving": "checkpoint",
}


def figures(
    steps: StepRecords, evaluations: list[tuple[int, float]], held_out: StepRecords
) -> Iterator[Figure]:
    """Yield all figures in order; those without data draw nothing."""
    name, _ = headline(steps.values())
    yield Figure(
        name.capitalize(),
        "Mean over a step's samples, with one standard deviation as a band; held out: mean over "
        "the evaluation's prompts.",
        partial(draw_headline, steps=steps, evaluations=evaluations),
    )
    for curves in _held_out_curves(held_out):
        yield Figure(curves.title, curves.text, partial(_lines, curves, held_out))
    for curves in _CURVES:
        yield Figure(curves.title, curves.text, partial(_lines, curves, steps))
    yield Figure(
        "Where a step's time goes",
        "Seconds of the trainer since the step before, so a checkpoint counts in the step that it "
        "delayed. A dashed line in any figure marks a restart of the trainer.",
        partial(_times, steps=steps),
    )


def _held_out_curves(held_out: StepRecords) -> Iterator[_Curves]:
    """Yield the curves of `evaluation.heldOut`, a line for each data set."""
    names = sorted({name for record in held_out.values() for name in record})

    def of_datasets(metric: str) -> dict[str, str]:
        ending = f"/{metric}"
        return {
            name: name.removeprefix("eval/").removesuffix(ending)
            for name in names
            if name.endswith(ending)
        }

    yield _Curves(
        "Held-out loss",
        "Loss of rows that are not trained. If it rises while the loss of training falls, the "
        "model learns its rows by heart.",
        of_datasets("loss"),
    )
    yield _Curves(
        "Held-out accuracy",
        "Share of the pairs that are not trained whose chosen answer has the higher reward; 0.5 is "
        "chance.",
        of_datasets("rewards/accuracies"),
    )


def restart_steps(steps: StepRecords) -> list[int]:
    """Return the first step of each later attempt of the trainer."""
    attempts = [(step, record.get("attempt", 1)) for step, record in steps.items()]
    return [step for (_, before), (step, now) in itertools.pairwise(attempts) if now != before]


def draw_headline(axes: Any, steps: StepRecords, evaluations: list[tuple[int, float]]) -> None:
    """Draw the headline metric. Evaluation rewards share its axis if it is a reward too."""
    name, course = headline(steps.values())
    judged = name == "reward"
    numbers = list(steps)[-len(course) :] if course else []
    axes.plot(numbers, course, color="#78909c", label="training samples" if judged else name)
    handles = axes.get_lines()
    if judged and (spread := [steps[step].get("rollout/reward_std") for step in numbers]):
        handles += _band(axes, numbers, course, spread)
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    if evaluations:
        evaluation_axes = axes if judged else axes.twinx()
        handles += evaluation_axes.plot(
            *zip(*evaluations, strict=True), color="#2e7d32", marker="o", label="held out"
        )
        if not judged:
            evaluation_axes.set_ylabel("reward")
            evaluation_axes.set_ylim(bottom=min(0.0, evaluation_axes.get_ylim()[0]))
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _mark_restarts(axes, steps)
    legend_above(axes, handles)
    hover(axes, {name: dict(zip(numbers, course, strict=True)), "held out": dict(evaluations)})


def _band(
    axes: Any, numbers: list[int], course: list[float], spread: list[float | None]
) -> list[Any]:
    """Draw one standard deviation to either side of the curve, at steps that record it."""
    rows = [row for row in zip(numbers, course, spread, strict=True) if row[2] is not None]
    if not rows:
        return []
    steps = [step for step, *_ in rows]
    lower = [mean - (std or 0.0) for _, mean, std in rows]
    upper = [mean + (std or 0.0) for _, mean, std in rows]
    label = "their standard deviation"
    return [axes.fill_between(steps, lower, upper, color="#cfd8dc", alpha=0.5, label=label)]


def _lines(curves: _Curves, steps: StepRecords, axes: Any) -> None:
    courses: dict[str, dict[int, float]] = {}
    for name, label in curves.names.items():
        points = {step: record[name] for step, record in steps.items() if name in record}
        if points:
            axes.plot(list(points), list(points.values()), label=label)
            courses[label] = points
    if curves.log:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    if axes.has_data():
        if axes.dataLim.ymin >= 0 and not curves.log:  # keep a curve of zeros off the axis
            axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
        _mark_restarts(axes, steps)
        legend_above(axes, columns=4)
        hover(axes, courses)


def _times(axes: Any, steps: StepRecords) -> None:
    rows = {
        phase: [record.get(f"perf/seconds/{phase}", 0.0) for record in steps.values()]
        for phase in _PHASES
    }
    shown = [phase for phase in rows if any(rows[phase])]
    if not shown:
        return
    axes.stackplot(
        list(steps),
        *(rows[phase] for phase in shown),
        labels=[_PHASES[phase] for phase in shown],
        colors=[STATES[phase] for phase in shown],
    )
    totals = sorted(sum(column) for column in zip(*rows.values(), strict=True))
    axes.set_ylim(
        0, 1.5 * totals[int(0.95 * (len(totals) - 1))]
    )  # a single long step must not flatten the others
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    _mark_restarts(axes, steps)
    legend_above(axes)
    hover(axes, {_PHASES[phase]: dict(zip(steps, rows[phase], strict=True)) for phase in shown})


def _mark_restarts(axes: Any, steps: StepRecords) -> None:
    for step in restart_steps(steps):
        axes.axvline(step, color="#b71c1c", linestyle="--", linewidth=0.8)
