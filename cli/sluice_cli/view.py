"""The views of `sluice run`: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sluice.api import RLJob, RLJobStatus
from sluice.telemetry import run_directory
from sluice.telemetry.headline import headline
from sluice_cli.monitor import Snapshot

_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Restarting": "yellow",
}


class Metrics:
    """The trainer's metrics file, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.steps: dict[int, dict[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """New records since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        fresh = list(run_directory.parse(whole.splitlines()))
        self.steps |= {int(record["step"]): record for record in fresh}
        return fresh


class View(Protocol):
    def show(
        self,
        status: RLJobStatus | None,
        snapshot: Snapshot,
        metrics: Metrics,
        fresh: list[dict[str, Any]],
    ) -> None:
        """The present picture; `fresh` are the metrics that are new in it."""

    def event(self, kind: str, text: str) -> None:
        """Something happened."""

    def close(self) -> None:
        """The run has ended."""


class PlainView:
    """One line for each step, each event and each change of state."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = ""

    def show(
        self,
        status: RLJobStatus | None,
        snapshot: Snapshot,
        metrics: Metrics,
        fresh: list[dict[str, Any]],
    ) -> None:
        if status and status.state != self._state:
            self._state = status.state
            self._print(f"state {status.state}{f': {waits}' if (waits := waiting(status)) else ''}")
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

    def event(self, kind: str, text: str) -> None:
        self._print(f"{'warning: ' if kind == 'Warning' else ''}{text}")

    def close(self) -> None:
        return

    def _print(self, text: str) -> None:
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True
        )


class LiveView:
    """Redraws one panel."""

    def __init__(self, console: Console, job: RLJob) -> None:
        self._job = job
        self._events: deque[str] = deque(maxlen=5)
        self._started = time.monotonic()
        self._first_step: tuple[float, int] | None = None
        self._live = Live(Text("starting"), console=console, refresh_per_second=4)
        self._live.start()

    def show(
        self,
        status: RLJobStatus | None,
        snapshot: Snapshot,
        metrics: Metrics,
        fresh: list[dict[str, Any]],
    ) -> None:
        state = status.state if status and status.state else "Pending"
        title = Text.assemble(
            (self._job.metadata.name, "bold"), "  ", (state, _STYLES.get(state, "cyan"))
        )
        parts: list[RenderableType] = [self._progress(snapshot), self._numbers(snapshot, metrics)]
        parts.append(roles(status, snapshot))
        if status and (waits := waiting(status)):
            parts.append(Text(waits, style="yellow"))
        parts += [Text(line, style="dim") for line in self._events]
        self._live.update(Panel(Group(*parts), title=title, title_align="left"))

    def event(self, kind: str, text: str) -> None:
        self._events.append(f"{time.strftime('%H:%M:%S')} {text.splitlines()[0]}")

    def close(self) -> None:
        self._live.stop()

    def _progress(self, snapshot: Snapshot) -> Table:
        step = snapshot.stats.step if snapshot.stats else 0
        total = snapshot.stats.total_steps if snapshot.stats else 0
        grid = Table.grid(padding=(0, 1), expand=False)
        elapsed = duration(time.monotonic() - self._started)
        grid.add_row(
            f"step {step} of {total or '?'}",
            ProgressBar(total=max(total, 1), completed=step, width=40),
            f"{elapsed} gone, {self._left(step, total)} left",
        )
        return grid

    def _left(self, step: int, total: int) -> str:
        now = time.monotonic()
        if self._first_step is None and step > 0:
            self._first_step = (now, step)
        if self._first_step is None or step <= self._first_step[1]:
            return "?"
        return duration((now - self._first_step[0]) / (step - self._first_step[1]) * (total - step))

    def _numbers(self, snapshot: Snapshot, metrics: Metrics) -> Table:
        stats, last = snapshot.stats, metrics.steps[max(metrics.steps)] if metrics.steps else {}
        name, course = headline(metrics.steps[s] for s in sorted(metrics.steps))
        grid = Table.grid(padding=(0, 3))
        grid.add_row(
            Text.assemble(
                f"{name} ",
                (f"{course[-1]:.3f}" if course else "-", "bold green"),
                " ",
                sparkline(course),
            ),
            Text.assemble("evaluation ", (evaluation_text(snapshot) or "-", "bold green")),
        )
        grid.add_row(
            f"{last.get('perf/tokens_per_second', 0):,.0f} tokens/s   "
            f"{last.get('perf/step_time', 0):.2f} s a step",
            f"policy lag {last.get('rollout/policy_lag', 0):.2f}   "
            f"buffer {stats.depth if stats else 0} ready, {stats.leases if stats else 0} in work",
        )
        return grid


def waiting(status: RLJobStatus) -> str:
    """Words for what a job waits for that does not run yet, or not any more."""
    running = status.condition("Running")
    return (
        running.message
        if running and status.state in ("Pending", "Queued", "Starting", "Restarting")
        else ""
    )


def roles(status: RLJobStatus | None, snapshot: Snapshot) -> Table:
    """A row for each role: how many pods run, which attempt, what its members do."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("role", "ready", "attempt", "restarts", "doing"):
        table.add_column(column)
    states = snapshot.states()
    for role in status.roles if status else []:
        doing = ", ".join(
            f"{state}"
            for name, state in sorted(states.items())
            if name.rpartition("-")[0] == role.name
        )
        if role.name == "rendezvous":
            doing = "serving" if snapshot.ledger else ""
        style = "" if role.ready >= role.desired else "yellow"
        ready = Text(f"{role.ready}/{role.desired}", style=style)
        table.add_row(role.name, ready, str(role.attempt), str(role.restarts), doing or "starting")
    return table


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
