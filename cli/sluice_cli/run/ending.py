"""The end of `sluice run`: the summary of the run, the last words, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sluice.api import RLJob, RLJobSpec, RLJobStatus, manifest
from sluice.telemetry import run_directory
from sluice.telemetry.group_accounting import Totals
from sluice.telemetry.run_warnings import RunWarning
from sluice.telemetry.summary import summarize
from sluice.wire.v1.buffer_pb2 import BufferStats
from sluice_cli.exits import Exit
from sluice_cli.run.monitor import Monitor
from sluice_client.advice import advice
from sluice_client.run_dir import read_json
from sluice_client.status_view import duration


def totals_of(directory: Path, stats: BufferStats | None) -> Totals:
    """By the last statistics that we have of the buffer, or by those that the trainer
    ended with.
    """
    path = directory / run_directory.TOTALS
    closing = Totals(**read_json(path)) if path.exists() else None
    return Totals.latest(closing, Totals.of(stats.counters, stats.failed) if stats else None)


def write_summary(
    directory: Path,
    status: RLJobStatus | None,
    monitor: Monitor,
    seconds: float,
    *,
    spec: RLJobSpec,
    warnings: Sequence[RunWarning] = (),
) -> None:
    """summary.json. Wall time and device time add up over the runs that continued each other.

    warnings: those that the run directory does not tell.
    """
    path = directory / run_directory.SUMMARY
    before = read_json(path) if path.exists() else {}
    earlier = before.get("wall_seconds", 0.0)
    device_seconds = Counter(monitor.devices.total())
    device_seconds.update(before.get("device_seconds", {}))
    totals = totals_of(directory, monitor.latest.stats)
    summary = summarize(
        directory,
        state=status.state if status else "Unknown",
        restarts=status.restarts if status else 0,
        wall_seconds=earlier + seconds,
        totals=totals,
        device_seconds=dict(device_seconds),
        spec=spec,
        warnings=warnings,
    )
    run_directory.write_json(path, summary)


def finish(console: Console, directory: Path, job: RLJob, status: RLJobStatus | None) -> Exit:
    """The last words, and the report, which takes seconds to draw."""
    summary = read_json(directory / run_directory.SUMMARY)
    code = last_words(console, directory, job, summary, status)
    if summary["steps"]:
        from sluice.telemetry.report import write_report

        report = write_report(directory, f"RLJob {job.metadata.name}")
        console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    if code is Exit.DONE:
        for line in next_steps(directory):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return code


def next_steps(directory: Path) -> list[str]:
    """Suggestions after a run that has succeeded, a line each."""
    return [
        "next: open the report in a browser",
        f"      all curves: tensorboard --logdir {directory / 'tensorboard'}",
        "      a task of your own: sluice init NAME (docs/your-own-task.md)",
    ]


def warning_lines(warnings: Sequence[RunWarning]) -> list[str]:
    """Active warnings, a line each; then one line that names those that no longer hold."""
    lines = [f"warning: {warning.sentence()}" for warning in warnings if warning.active]
    past = [
        f"{warning.kind} ({warning.steps})" if warning.steps else warning.kind
        for warning in warnings
        if not warning.active
    ]
    if past:
        lines.append(f"warnings that no longer hold: {', '.join(past)}")
    return lines


def last_words(
    console: Console,
    directory: Path,
    job: RLJob,
    summary: dict[str, Any],
    status: RLJobStatus | None,
) -> Exit:
    """Tell how the run has ended. Answers the exit code."""
    if status is None:
        console.print("stopped; the same command continues the run")
        return Exit.STOPPED
    words = f"{status.state} after {duration(summary['wall_seconds'])}"
    if summary["steps"]:
        learned = ("reward", "eval") if summary["reward_last"] is not None else ("loss", "eval")
        ends = [f"{what}_{when}" for what in learned for when in ("first", "last")]
        shown = {k: summary[k] for k in ("steps", *ends, "restarts") if summary[k] is not None}
        words += ": " + ", ".join(
            f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()
        )
    console.print(words, highlight=False, soft_wrap=True)
    if any(summary["trainer_seconds"].values()):
        parts = summary["trainer_seconds"].items()
        text = ", ".join(f"{part} {value:g} s" for part, value in parts)
        console.print(f"trainer: {text}", highlight=False, soft_wrap=True)
    if summary["goodput_text"]:
        console.print(f"goodput: {summary['goodput_text']}", highlight=False, soft_wrap=True)
    if summary["plan"]:
        console.print(f"plan: {summary['plan']}", highlight=False, soft_wrap=True)
    for line in warning_lines([RunWarning(**record) for record in summary["warnings"]]):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if status.state == "Failed":
        condition, failure = status.condition("Failed"), status.last_failure
        reason = condition.message if condition else "the job failed"
        console.print(f"error: {reason}", markup=False, highlight=False, soft_wrap=True)
        if (
            failure
            and failure.message
            and failure.message.splitlines()[-1].removeprefix("error: ") not in reason
        ):
            console.print(failure.message, markup=False, highlight=False, soft_wrap=True)
        if failure:
            cure = advice(failure, manifest(job), directory)
            console.print(f"what to do: {cure}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"logs: {directory / 'logs'}", markup=False, soft_wrap=True)
        return Exit.FAILED
    return Exit.DONE
