"""summary.json: what a run came to, from what it left in its directory and the last statistics of
the buffer.
"""

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
    """The summary. Rewards, evaluations and warnings come from the run directory.

    device_seconds: by role/state, of the rendezvous. warnings: those that the run directory does
    not tell.
    """
    books, counters = totals.group_counts(), totals.counters
    steps = run_directory.by_step(directory / run_directory.METRICS)
    rewards, losses, differences = (
        [record[name] for record in steps.values() if name in record]
        for name in ("rollout/raw_reward", "train/loss", "train/train_rollout_logprob_abs_diff_max")
    )
    evaluations = evaluation_means(directory)
    trained = max(steps, default=0)
    all_warnings = [
        *books.warnings(example_of_failure(directory)),
        *warnings,
        *health.warnings(steps.values()),
    ]
    goodput = Goodput.of(device_seconds, counters, trained, colocated=spec.trainer.colocate)
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
        "groups_leased": books.leased,
        "groups_trained": books.trained,
        "groups_filtered": books.filtered,
        "groups_failed": books.failed,
        "groups_failed_by_reason": dict(books.reasons),
        "groups_open": books.open,
        "groups_lost": books.lost or counters.get("groups_lost", 0),
        "groups_trained_twice": books.twice,
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
    """Why the first group failed, with its row; empty if none is written down."""
    first = next(run_directory.records(directory / run_directory.FAILURES), None)
    return f"row {first['row']} of {first['dataset']}: {first['reason']}" if first else ""


def trainer_seconds(directory: Path) -> dict[str, float]:
    """Seconds of the trainer until its first step (start), in its steps, and after the last (end):
    of all attempts, and of steps that were trained again too.
    """
    seconds = {"start": 0.0, "steps": 0.0, "end": 0.0}
    for record in run_directory.records(directory / run_directory.SECONDS):
        seconds[record["part"]] += sum(record["seconds"].values())
    for record in run_directory.records(directory / run_directory.METRICS):
        seconds["steps"] += record.get("perf/step_time", 0.0)
    return {part: round(value, 1) for part, value in seconds.items()}


def evaluation_means(directory: Path) -> list[tuple[int, float]]:
    """(version, mean reward over data sets), by version."""
    means: dict[int, dict[str, float]] = {}
    for record in run_directory.records(directory / run_directory.EVALUATION):
        means.setdefault(int(record["version"]), {})[record["dataset"]] = record[
            f"eval/{record['dataset']}"
        ]
    return [
        (version, sum(values.values()) / len(values)) for version, values in sorted(means.items())
    ]
