"""summary.json: the result of a run, from its run directory and the buffer's last statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sluice.api import RLJobSpec
from sluice.telemetry import health, run_directory
from sluice.telemetry.goodput import Goodput
from sluice.telemetry.group_accounting import Totals
from sluice.telemetry.planner import advise
from sluice.telemetry.run_warnings import RunWarning, ordered


def summarize(
    directory: Path,
    *,
    state: str,
    restarts: int,
    wall_seconds: float,
    totals: Totals,
    device_seconds: Mapping[str, float],
    spec: RLJobSpec,
    warnings: Iterable[RunWarning] = (),
) -> dict[str, Any]:
    """Return the summary of a run.

    Parameters
    ----------
    directory
        The run directory, which holds rewards, evaluations and step records.
    state
        Final state of the job.
    restarts
        Attempts that replaced a failed one.
    wall_seconds
        Duration of the run.
    totals
        The buffer's counters.
    device_seconds
        Seconds by `role/state`, from the rendezvous.
    spec
        The job.
    warnings
        Warnings that do not follow from the run directory.

    """
    groups, counters = totals.group_counts(), totals.counters
    steps = run_directory.by_step(directory / run_directory.METRICS)
    rewards, losses, differences = (
        [record[name] for record in steps.values() if name in record]
        for name in ("rollout/raw_reward", "train/loss", "train/train_rollout_logprob_abs_diff_max")
    )
    evaluations = evaluation_means(directory)
    trained = max(steps, default=0)
    all_warnings = [
        *groups.warnings(example_of_failure(directory)),
        *warnings,
        *health.warnings(steps.values()),
    ]
    goodput = Goodput.from_counters(
        device_seconds, counters, trained, colocated=spec.trainer.colocate
    )
    advice = advise(device_seconds, trained, spec)
    return {
        "state": state,
        "steps": trained,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "eval_first": evaluations[0][1] if evaluations else None,
        "eval_last": evaluations[-1][1] if evaluations else None,
        "samples_trained": counters.get("samples_trained", 0),
        "groups_leased": groups.leased,
        "groups_trained": groups.trained,
        "groups_filtered": groups.filtered,
        "groups_failed": groups.failed,
        "groups_failed_by_reason": dict(groups.reasons),
        "groups_open": groups.open,
        "groups_lost": groups.lost or counters.get("groups_lost", 0),
        "groups_trained_twice": groups.twice,
        "warnings": [warning.to_json() for warning in ordered(all_warnings)],
        "restarts": restarts,
        "logprob_diff_max": max(differences, default=None),
        "wall_seconds": round(wall_seconds, 1),
        "trainer_seconds": trainer_seconds(directory),
        "goodput": round(goodput.ratio, 4) if goodput.total else None,
        "goodput_text": goodput.text() if goodput.total else "",
        "plan": advice.text() if advice else "",
        "goodput_seconds": {key: round(value, 1) for key, value in goodput.seconds.items()},
        "device_seconds": {key: round(value, 1) for key, value in device_seconds.items()},
    }


def example_of_failure(directory: Path) -> str:
    """Return why the first failed group failed, with its row; empty if no failure is recorded."""
    first = next(run_directory.records(directory / run_directory.FAILURES), None)
    return f"row {first['row']} of {first['dataset']}: {first['reason']}" if first else ""


def trainer_seconds(directory: Path) -> dict[str, float]:
    """Return seconds of the trainer before its first step, in its steps, and after its last.

    All attempts count, and so do steps that were trained again.
    """
    seconds = {"start": 0.0, "steps": 0.0, "end": 0.0}
    for record in run_directory.records(directory / run_directory.SECONDS):
        seconds[record["part"]] += sum(record["seconds"].values())
    for record in run_directory.records(directory / run_directory.METRICS):
        seconds["steps"] += record.get("perf/step_time", 0.0)
    return {part: round(value, 1) for part, value in seconds.items()}


def held_out_rows(directory: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of held-out rows with given answers, by version."""
    by_version: dict[int, dict[str, float]] = {}
    for record in run_directory.records(directory / run_directory.EVALUATION):
        if f"eval/{record['dataset']}" not in record:
            own = {name: value for name, value in record.items() if name.startswith("eval/")}
            by_version.setdefault(int(record["version"]), {}).update(own)
    return dict(sorted(by_version.items()))


def evaluation_means(directory: Path) -> list[tuple[int, float]]:
    """Return (version, mean reward over data sets), by version."""
    means: dict[int, dict[str, float]] = {}
    for record in run_directory.records(directory / run_directory.EVALUATION):
        reward = record.get(f"eval/{record['dataset']}")
        if reward is not None:  # held-out rows have a loss, and no reward
            means.setdefault(int(record["version"]), {})[record["dataset"]] = reward
    return [
        (version, sum(values.values()) / len(values)) for version, values in sorted(means.items())
    ]
