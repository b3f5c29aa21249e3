"""The end of `sluice run`: its summary, the last lines of its output, and the report."""

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
    """Return the newest totals of groups: from the buffer's statistics or the trainer's file."""
    path = directory / run_directory.TOTALS
    closing = Totals(**read_json(path)) if path.exists() else None
    return Totals.latest(
        closing, Totals.from_counters(stats.counters, stats.failed) if stats else None
    )


def write_summary(
    directory: Path,
    status: RLJobStatus | None,
    monitor: Monitor,
    seconds: float,
    *,
    spec: RLJobSpec,
    warnings: Sequence[RunWarning] = (),
) -> None:
    """Write summary.json.

    Parameters
    ----------
    directory
        The run directory.
    status
        Last status of the job; None if there was none.
    monitor
        Holds the last statistics of the buffer, and the device time of this start.
    seconds
        Wall time of this start. Wall time and device time are added to those of earlier starts.
    spec
        The job's spec.
    warnings
        Warnings that are not in the files of the run directory.

    """
    path = directory / run_directory.SUMMARY
    # The summary of an earlier start of this run.
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
    """Print how the run ended, and write its report, which takes seconds."""
    summary = read_json(directory / run_directory.SUMMARY)
    code = print_outcome(console, directory, job, summary, status)
    if summary["steps"]:
        # Matplotlib takes a second to import.
        from sluice.telemetry.report import write_report

        report = write_report(directory, f"RLJob {job.metadata.name}")
        console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    if code is Exit.DONE:
        for line in next_steps(directory):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return code


def next_steps(directory: Path) -> list[str]:
    """Suggest what to do after a run that has succeeded."""
    return [
        "next: open the report in a browser",
        f"      see all curves: tensorboard --logdir {directory / 'tensorboard'}",
        "      start your own task: sluice init NAME (docs/your-own-task.md)",
    ]


def warning_lines(warnings: Sequence[RunWarning]) -> list[str]:
    """List the active warnings, and then name the past ones in one line."""
    lines = [f"warning: {warning.sentence()}" for warning in warnings if warning.active]
    past = [
        f"{warning.kind} ({warning.steps})" if warning.steps else warning.kind
        for warning in warnings
        if not warning.active
    ]
    if past:
        lines.append(f"warnings that no longer hold: {', '.join(past)}")
    return lines


def result_line(state: str, summary: dict[str, Any]) -> str:
    """Return the result of a run: its time, steps and restarts, and what reward or loss did."""
    line = f"{state} after {duration(summary['wall_seconds'])}"
    if not summary["steps"]:
        return line
    parts = [_count(summary["steps"], "step")]
    # A job with given answers has no reward.
    for name in ("reward" if summary["reward_last"] is not None else "loss", "eval"):
        first, last = summary[f"{name}_first"], summary[f"{name}_last"]
        if last is not None:
            parts.append(f"{name} {first:.3f} -> {last:.3f}")
    return f"{line}: {', '.join([*parts, _count(summary['restarts'], 'restart')])}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_outcome(
    console: Console,
    directory: Path,
    job: RLJob,
    summary: dict[str, Any],
    status: RLJobStatus | None,
) -> Exit:
    """Print how the run ended; return the exit code."""
    if status is None:
        console.print("stopped; the same command continues the run")
        return Exit.STOPPED
    console.print(result_line(status.state, summary), highlight=False, soft_wrap=True)
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
        # The condition often ends with the last line of the failure: print that only once.
        if (
            failure
            and failure.message
            and failure.message.splitlines()[-1].removeprefix("error: ") not in reason
        ):
            console.print(failure.message, markup=False, highlight=False, soft_wrap=True)
        if failure:
            remedy = advice(failure, manifest(job), directory)
            console.print(f"what to do: {remedy}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"logs: {directory / 'logs'}", markup=False, soft_wrap=True)
        return Exit.FAILED
    return Exit.DONE
