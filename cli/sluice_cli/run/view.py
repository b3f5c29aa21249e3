"""The views of `sluice run`: a live one on a terminal (live.py), plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from rich.console import Console

from sluice.api import RLJobStatus
from sluice.telemetry.headline import headline
from sluice_cli.run.monitor import Snapshot
from sluice_cli.run.run_files import Record, RunFiles

_BLOCKS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    def show(
        self,
        status: RLJobStatus | None,
        snapshot: Snapshot,
        files: RunFiles,
        fresh: list[Record],
    ) -> None:
        """The present picture; `fresh` are the metrics that are new in it."""

    def event(self, kind: str, text: str) -> None:
        """Something happened."""

    def close(self) -> None:
        """The run has ended."""


class PlainView:
    """One line for each step, each event and each change of state, and while a job starts for each
    change of what it waits for.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = ""
        self._waits = ""

    def show(
        self,
        status: RLJobStatus | None,
        snapshot: Snapshot,
        files: RunFiles,
        fresh: list[Record],
    ) -> None:
        if status:
            self._show_state(status.state, waiting(status))
        total = snapshot.stats.total_steps if snapshot.stats else 0
        for record in fresh:
            evaluation = evaluation_text(snapshot)
            name, course = headline([record])
            self._print(
                f"step {record['step']}/{total}{f' {name} {course[-1]:.3f}' if course else ''}"
                f"{f' eval {evaluation}' if evaluation else ''} "
                f"{record['perf/tokens_per_second']:.0f} tok/s "
                f"lag {record['rollout/policy_lag']:.2f} step {record['perf/step_time']:.2f} s"
            )

    def _show_state(self, state: str, waits: str) -> None:
        changed = state != self._state or (state == "Starting" and waits != self._waits)
        self._state, self._waits = state, waits
        if changed:
            self._print(f"state {state}{f': {waits}' if waits else ''}")

    def event(self, kind: str, text: str) -> None:
        self._print(f"{'warning: ' if kind == 'Warning' else ''}{text}")

    def close(self) -> None:
        return

    def _print(self, text: str) -> None:
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True
        )


def waiting(status: RLJobStatus) -> str:
    """Words for what a job waits for that does not run yet, or not any more."""
    running = status.condition("Running")
    return (
        running.message
        if running and status.state in ("Pending", "Queued", "Starting", "Restarting")
        else ""
    )


def sparkline(values: list[float], width: int = 40) -> str:
    """The course of a number in one line of text."""
    if len(values) < 2:
        return ""
    size = max(len(values) / width, 1.0)
    count = min(len(values), width)
    buckets = [
        values[int(i * size) : max(int((i + 1) * size), int(i * size) + 1)] for i in range(count)
    ]
    means = [sum(b) / len(b) for b in buckets if b]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((m - low) * scale)] for m in means)


def evaluation_text(snapshot: Snapshot) -> str:
    evaluation = dict(snapshot.stats.evaluation) if snapshot.stats else {}
    names: Iterable[str] = sorted(evaluation)
    return ", ".join(
        f"{evaluation[n]:.3f}" if len(evaluation) == 1 else f"{n[5:]} {evaluation[n]:.3f}"
        for n in names
    )


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
