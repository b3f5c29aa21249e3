"""The view of `sluice run` on a terminal: one panel that is drawn again and again."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sluice.api import RLJob, RLJobStatus, RoleStatus
from sluice.telemetry.headline import headline
from sluice_cli.run.monitor import Snapshot
from sluice_cli.run.run_files import Record, RunFiles
from sluice_cli.run.view import duration, evaluation_text, sparkline, waiting

STYLES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Restarting": "yellow",
}
ENDED = ("Succeeded", "Failed", "Suspended")
"""States in which no pod works any more."""
_SAMPLE = 60


class LiveView:
    """Redraws one panel. directory: of the run."""

    def __init__(self, console: Console, job: RLJob, directory: Path) -> None:
        self._job, self._directory = job, directory
        self._events: deque[str] = deque(maxlen=5)
        self._started = time.monotonic()
        self._live = Live(Text("starting"), console=console, refresh_per_second=4)
        self._live.start()

    def show(
        self,
        status: RLJobStatus | None,
        snapshot: Snapshot,
        files: RunFiles,
        fresh: list[Record],
    ) -> None:
        state = status.state if status and status.state else "Pending"
        title = Text.assemble(
            (self._job.metadata.name, "bold"), "  ", (state, STYLES.get(state, "cyan"))
        )
        gone = time.monotonic() - self._started
        parts = [progress(snapshot, files, gone), numbers(snapshot, files), roles(status, snapshot)]
        if status and (waits := waiting(status)):
            parts.append(Text(waits, style="yellow"))
        if (sample := files.sample()) is not None:
            parts.append(sample_text(sample))
        parts += [Text(line, style="dim") for line in self._events]
        place = Text(str(self._directory), style="dim")
        self._live.update(Panel(Group(*parts), title=title, title_align="left", subtitle=place))

    def event(self, kind: str, text: str) -> None:
        self._events.append(f"{time.strftime('%H:%M:%S')} {text.splitlines()[0]}")

    def close(self) -> None:
        self._live.stop()


def progress(snapshot: Snapshot, files: RunFiles, gone: float) -> RenderableType:
    """How far the run is. gone: seconds since it was started here."""
    step = snapshot.stats.step if snapshot.stats else 0
    total = snapshot.stats.total_steps if snapshot.stats else 0
    left = files.seconds_left(step, total) if total else None
    grid = Table.grid(padding=(0, 1), expand=False)
    grid.add_row(
        f"step {step} of {total or '?'}",
        ProgressBar(total=max(total, 1), completed=step, width=40),
        f"{duration(gone)} gone, {'?' if left is None else duration(left)} left",
    )
    return grid


def numbers(snapshot: Snapshot, files: RunFiles) -> RenderableType:
    """The newest step's figures, and the courses of reward and evaluation."""
    stats, last = snapshot.stats, files.last()
    name, course = headline(files.steps[s] for s in sorted(files.steps))
    evaluation = evaluation_text(snapshot) or "-"
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        _course(name, f"{course[-1]:.3f}" if course else "-", course),
        _course("evaluation", evaluation, files.evaluations()),
    )
    grid.add_row(
        f"{last.get('perf/tokens_per_second', 0):,.0f} tokens/s   "
        f"{last.get('perf/step_time', 0):.2f} s a step",
        f"policy lag {last.get('rollout/policy_lag', 0):.2f}   "
        f"buffer {stats.depth if stats else 0} ready, {stats.leases if stats else 0} in work",
    )
    if "rollout/response_len/mean" in last:
        cut = last.get("rollout/truncated_ratio", 0.0)
        grid.add_row(
            f"responses {last['rollout/response_len/mean']:,.0f} tokens, "
            f"longest {last.get('rollout/response_len/max', 0):,.0f}, {cut:.0%} cut off",
            "",
        )
    return grid


def _course(name: str, value: str, course: list[float]) -> Text:
    return Text.assemble(f"{name} ", (value, "bold green"), " ", sparkline(course, width=24))


def sample_text(sample: Record) -> Text:
    """One sample in a line: the end of its prompt, the beginning of its response, its reward."""
    prompt, response = _plain(sample.get("prompt")), _plain(sample.get("response"))
    ends = f"...{prompt[-_SAMPLE:]}" if len(prompt) > _SAMPLE else prompt
    begins = f"{response[:_SAMPLE]}..." if len(response) > _SAMPLE else response
    reward = sample.get("reward")
    judged = f"  reward {reward:.3g}" if isinstance(reward, int | float) else ""
    return Text.assemble(("sample ", "dim"), ends, (" > ", "dim"), (begins, "bold"), judged)


def _plain(value: Any) -> str:
    """A text in one line; of messages the last one's."""
    if isinstance(value, list):
        value = value[-1].get("content", "") if value and isinstance(value[-1], dict) else ""
    return " ".join(str(value or "").split())


def roles(status: RLJobStatus | None, snapshot: Snapshot) -> RenderableType:
    """A row for each role: how many pods run, which attempt, what its members do."""
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


def _doing(role: RoleStatus, snapshot: Snapshot) -> str:
    """By the members' own words; of a pod that is gone they are old."""
    if role.name == "rendezvous":
        return "serving" if snapshot.ledger else "starting"
    states = [
        state
        for name, state in sorted(snapshot.states().items())
        if name.rpartition("-")[0] == role.name
    ]
    return ", ".join(states) or "starting"


def _ended(status: RLJobStatus, role: RoleStatus) -> str:
    """A job that has ended: its pods end too, and one of them may have failed."""
    failure = status.last_failure
    if status.state == "Failed" and failure is not None and failure.role == role.name:
        return "failed"
    return "ending" if role.ready else "ended"
