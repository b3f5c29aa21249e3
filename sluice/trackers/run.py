"""What a tracker is told of a run, and what it has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that a tracker shows.

    Parameters
    ----------
    project
        `telemetry.trackers[].project`.
    name
        Name of the run in the tracker.
    identity
        Hexadecimal number of the run. A run that goes on after a restart has the same one.
    config
        The job's spec.
    directory
        The run directory.
    args
        `telemetry.trackers[].args`.

    """

    project: str
    name: str
    identity: str
    config: dict[str, Any]
    directory: Path
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Picture:
    """A small copy of an image of a sample.

    path: of a JPEG. caption: row of the table of samples, and number of the image in it, from 0.
    """

    path: Path
    caption: str


class Tracker(Protocol):
    """A tracker's run. It is made with a `Run`, and continues the one of the same identity."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of a step; of an evaluation the step is the version of the weights.

        A step that was trained again after a restart comes again.
        """

    def log_samples(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Add samples: rows of a file of the run directory, at most `MOST_ROWS`.

        name: `samples` or, of an evaluation, `samples/eval/NAME`.
        """

    def log_pictures(self, name: str, pictures: list[Picture], step: int) -> None:
        """Add the pictures of samples; `name` is that of the samples with `/pictures`."""

    def log_file(self, path: Path) -> None:
        """Add a file of the run directory. It replaces an earlier one of the same name."""

    def close(self) -> None:
        """Send what is left, and end."""
