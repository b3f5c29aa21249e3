"""The output of `sluice run`: a live panel on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sluice.api import RLJob, RLJobStatus, RoleStatus
from sluice.telemetry.headline import headline
from sluice_cli.run.monitor import ServiceSnapshot
from sluice_cli.run.run_files import Record, RunFiles
from sluice_client.status_view import STATE_STYLES, duration

# States of a job without running pods.
ENDED = ("Succeeded", "Failed", "Suspended")
_SAMPLE_CHARACTERS = 60
_BLOCKS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """Output of a run while it goes on."""

    def show(
        self,
        status: RLJobStatus | None,
        snapshot: ServiceSnapshot,
        files: RunFiles,
        new_steps: list[Record],
    ) -> None:
        """Show the present state; `new_steps` are the metrics of steps not shown before."""

    def event(self, kind: str, text: str) -> None:
        """Show an event of type `Normal` or `Warning`."""

    def close(self) -> None:
        """End the output."""


class PlainView:
    """Prints a line for each step, each event and each change of the job's state.

    While a job starts, it also prints a line whenever the reason of the wait changes.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = ""
        self._waits = ""

    def show(
        self,
        status: RLJobStatus | None,
        snapshot: ServiceSnapshot,
        files: RunFiles,
        new_steps: list[Record],
    ) -> None:
        if status:
            self._show_state(status.state, waiting(status))
        total = snapshot.stats.total_steps if snapshot.stats else 0
        for record in new_steps:
            evaluation = evaluation_text(snapshot)
            name, values = headline([record])
            self._print(
                f"step {record['step']}/{total}{f' {name} {values[-1]:.3f}' if values else ''}"
                f"{f' eval {evaluation}' if evaluation else ''} "
                f"{record['perf/tokens_per_second']:.0f} tok/s "
                f"lag {record['rollout/policy_lag']:.2f} step {record['perf/step_time']:.2f} s"
            )

    def _show_state(self, state: str, waits: str) -> None:
        # While pods are Pending their number changes often: no line for each of them.
        changed = state != self._state or (state == "Starting" and waits != self._waits)
        self._state, self._waits = state, waits
        if changed:
            self._print(f"state {state}{f': {waits}' if waits else ''}")

    def event(self, kind: str, text: str) -> None:
        self._print(f"{'warning: ' if kind == 'Warning' else ''}{text}")

    def close(self) -> None:
        return

    def _print(self, text: str) -> None:
        # Texts of users and engines may have brackets, which rich would take for markup.
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True
        )


class LiveView:
    """Redraws one panel with the run's progress, figures, a sample and the newest events."""

    def __init__(self, console: Console, job: RLJob, directory: Path) -> None:
        self._job, self._directory = job, directory
        self._events: deque[str] = deque(maxlen=5)
        self._started = time.monotonic()
        self._live = Live(Text("starting"), console=console, refresh_per_second=4)
        self._live.start()

    def show(
        self,
        status: RLJobStatus | None,
        snapshot: ServiceSnapshot,
        files: RunFiles,
        new_steps: list[Record],
    ) -> None:
        state = status.state if status and status.state else "Pending"
        title = Text.assemble(
            (self._job.metadata.name, "bold"), "  ", (state, STATE_STYLES.get(state, "cyan"))
        )
        elapsed = time.monotonic() - self._started
        parts = [
            progress(snapshot, files, elapsed),
            numbers(snapshot, files),
            roles(status, snapshot),
        ]
        if status and (waits := waiting(status)):
            parts.append(Text(waits, style="yellow"))
        if (sample := files.sample()) is not None:
            parts.append(sample_text(sample))
        parts += [Text(line, style="dim") for line in self._events]
        subtitle = Text(str(self._directory), style="dim")
        self._live.update(Panel(Group(*parts), title=title, title_align="left", subtitle=subtitle))

    def event(self, kind: str, text: str) -> None:
        self._events.append(f"{time.strftime('%H:%M:%S')} {text.splitlines()[0]}")

    def close(self) -> None:
        self._live.stop()


def progress(snapshot: ServiceSnapshot, files: RunFiles, elapsed: float) -> RenderableType:
    """Render the step, a bar and the time left; `elapsed` is in seconds since this start."""
    step = snapshot.stats.step if snapshot.stats else 0
    total = snapshot.stats.total_steps if snapshot.stats else 0
    left = files.seconds_left(step, total) if total else None
    grid = Table.grid(padding=(0, 1), expand=False)
    grid.add_row(
        f"step {step} of {total or '?'}",
        ProgressBar(total=max(total, 1), completed=step, width=40),
        f"{duration(elapsed)} elapsed, {'?' if left is None else duration(left)} left",
    )
    return grid


def numbers(snapshot: ServiceSnapshot, files: RunFiles) -> RenderableType:
    """Render the newest step's figures, and the curves of reward and evaluation."""
    stats, last = snapshot.stats, files.last()
    name, values = headline(files.steps[step] for step in sorted(files.steps))
    evaluation = evaluation_text(snapshot) or "-"
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        _curve(name, f"{values[-1]:.3f}" if values else "-", values),
        _curve("evaluation", evaluation, files.evaluations()),
    )
    grid.add_row(
        f"{last.get('perf/tokens_per_second', 0):,.0f} tokens/s   "
        f"{last.get('perf/step_time', 0):.2f} s per step",
        f"policy lag {last.get('rollout/policy_lag', 0):.2f}   "
        f"buffer {stats.depth if stats else 0} ready, {stats.leases if stats else 0} leased",
    )
    if "rollout/response_len/mean" in last:
        truncated = last.get("rollout/truncated_ratio", 0.0)
        grid.add_row(
            f"responses {last['rollout/response_len/mean']:,.0f} tokens, "
            f"longest {last.get('rollout/response_len/max', 0):,.0f}, {truncated:.0%} cut off",
            "",
        )
    return grid


def _curve(name: str, value: str, values: list[float]) -> Text:
    return Text.assemble(f"{name} ", (value, "bold green"), " ", sparkline(values, width=24))


def sample_text(sample: Record) -> Text:
    """Render the end of a sample's prompt, the start of its response and its reward in a line."""
    prompt, response = _one_line(sample.get("prompt")), _one_line(sample.get("response"))
    size = _SAMPLE_CHARACTERS
    prompt_end = f"...{prompt[-size:]}" if len(prompt) > size else prompt
    response_start = f"{response[:size]}..." if len(response) > size else response
    reward = sample.get("reward")
    score = f"  reward {reward:.3g}" if isinstance(reward, int | float) else ""
    return Text.assemble(
        ("sample ", "dim"), prompt_end, (" > ", "dim"), (response_start, "bold"), score
    )


def _one_line(value: Any) -> str:
    """Return a text, or the last of several messages, without line breaks."""
    if isinstance(value, list):
        value = value[-1].get("content", "") if value and isinstance(value[-1], dict) else ""
    return " ".join(str(value or "").split())


def roles(status: RLJobStatus | None, snapshot: ServiceSnapshot) -> RenderableType:
    """Render a row for each role: running pods, attempt, restarts, and what its members do."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("role", "ready", "attempt", "restarts", "doing"):
        table.add_column(column)
    for role in status.roles if status else []:
        assert status is not None
        ended = status.state in ENDED
        style = "" if ended or role.ready >= role.desired else "yellow"
        ready = Text(f"{role.ready}/{role.desired}", style=style)
        doing = _ended(status, role) if ended else _doing(role, snapshot)
        table.add_row(role.name, ready, str(role.attempt), str(role.restarts), doing)
    return table


def _doing(role: RoleStatus, snapshot: ServiceSnapshot) -> str:
    """Say what the members of a role report. A member that is gone keeps its last report."""
    if role.name == "rendezvous":
        return "serving" if snapshot.ledger else "starting"
    states = [
        state
        for name, state in sorted(snapshot.states().items())
        if name.rpartition("-")[0] == role.name
    ]
    return ", ".join(states) or "starting"


def _ended(status: RLJobStatus, role: RoleStatus) -> str:
    """Say how a role of an ended job ended: one of its pods may have failed."""
    failure = status.last_failure
    if status.state == "Failed" and failure is not None and failure.role == role.name:
        return "failed"
    return "ending" if role.ready else "ended"


def waiting(status: RLJobStatus) -> str:
    """Say what a job waits for that does not run yet, or no longer runs; else empty."""
    running = status.condition("Running")
    return (
        running.message
        if running and status.state in ("Pending", "Queued", "Starting", "Restarting")
        else ""
    )


def sparkline(values: list[float], width: int = 40) -> str:
    """Draw numbers as a curve of at most `width` characters; empty for fewer than two numbers."""
    if len(values) < 2:
        return ""
    # Each character is the mean of a bucket of neighbouring values.
    size = max(len(values) / width, 1.0)
    count = min(len(values), width)
    buckets = [
        values[int(i * size) : max(int((i + 1) * size), int(i * size) + 1)] for i in range(count)
    ]
    means = [sum(bucket) / len(bucket) for bucket in buckets if bucket]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def evaluation_text(snapshot: ServiceSnapshot) -> str:
    """Return the newest evaluation: a number, or `name number` for each of several data sets."""
    scores = dict(snapshot.stats.evaluation) if snapshot.stats else {}
    if len(scores) == 1:
        return f"{next(iter(scores.values())):.3f}"
    return ", ".join(
        f"{name.removeprefix('eval/')} {score:.3f}" for name, score in sorted(scores.items())
    )
