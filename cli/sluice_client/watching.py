"""A bar of steps, on a terminal and in a notebook."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from sluice.api import RLJobStatus


class Progress:
    """Use with `with`. visible: False shows nothing."""

    def __init__(self, name: str, *, visible: bool) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            disable=not visible,
        )
        self._task = self._bar.add_task(name, total=None, told="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, status: RLJobStatus) -> None:
        """Show the job's state, step and headline."""
        number = f"reward {status.reward}" if status.reward else ""
        number = number or (f"loss {status.loss}" if status.loss else "")
        told = " ".join(filter(None, (status.state or "Pending", number)))
        self._bar.update(
            self._task, completed=status.step or 0, total=status.total_steps, told=told
        )
