"""Read what is new in a run directory, from a position that survives restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.telemetry import run_directory
from sluice.trackers.run import Picture, Tracker

DIRECTORY = "trackers"
_FILES = (run_directory.METRICS, run_directory.EVALUATION)
# Bounds of a table of samples: its rows, the characters of a text in it, and pictures beside it.
MOST_ROWS, MOST_CHARACTERS, MOST_PICTURES = 64, 20_000, 16
# Files that a tracker gets at the end; the report is there if the run has ended before.
_ARTIFACTS = (
    run_directory.JOB,
    run_directory.VERSIONS,
    run_directory.TOTALS,
    run_directory.SUMMARY,
    "report.html",
)
# Parts of a record that are no metrics.
_NO_METRICS = ("step", "version", "attempt", "time", "dataset")


@dataclass(slots=True)
class Follower:
    """Passes on the records of a run to a tracker.

    Parameters
    ----------
    directory
        The run directory.
    name
        Name of the file with the position.
    sample_every_steps
        Steps between tables of samples; 0: none.

    """

    directory: Path
    name: str
    sample_every_steps: int
    # Bytes of each file that were passed on.
    _positions: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        try:
            self._positions = json.loads(self._file.read_text())
        except (FileNotFoundError, ValueError):
            self._positions = {}

    def pass_on(self, tracker: Tracker) -> None:
        """Pass on all records that are new. The position moves with each of them."""
        for file in _FILES:
            for record, end in self._new(file):
                if file == run_directory.METRICS:
                    self._step(tracker, record)
                else:
                    self._evaluation(tracker, record)
                self._move(file, end)

    def pass_on_files(self, tracker: Tracker) -> None:
        """Pass on the files that describe the run, as far as it has them."""
        for name in _ARTIFACTS:
            if (self.directory / name).exists():
                tracker.log_file(self.directory / name)

    def left(self) -> int:
        """Return the number of records that were not passed on."""
        return sum(1 for file in _FILES for _ in self._new(file))

    def _step(self, tracker: Tracker, record: dict[str, Any]) -> None:
        step = int(record["step"])
        tracker.log(_metrics(record), step)
        every = self.sample_every_steps
        if every and (step % every == 0 or step == 1):
            self._samples(tracker, "samples", f"step_{step:07d}.jsonl", step)

    def _evaluation(self, tracker: Tracker, record: dict[str, Any]) -> None:
        version, name = int(record["version"]), record["dataset"]
        tracker.log(_metrics(record), version)
        if self.sample_every_steps:
            self._samples(
                tracker, f"samples/eval/{name}", f"eval_{name}_{version:07d}.jsonl", version
            )

    def _samples(self, tracker: Tracker, name: str, file: str, step: int) -> None:
        rows = [*run_directory.records(self.directory / "samples" / file)]
        if len(rows) > MOST_ROWS:
            print(f"{name} of step {step}: {MOST_ROWS} of {len(rows)} rows", flush=True)
        rows = rows[:MOST_ROWS]
        if rows:
            tracker.log_samples(name, [bounded(row) for row in rows], step)
        if pictures := self._pictures(rows):
            tracker.log_pictures(f"{name}/pictures", pictures, step)

    def _pictures(self, rows: list[dict[str, Any]]) -> list[Picture]:
        """Return the thumbnails that the trainer has made of the rows' images."""
        folder = self.directory / "samples" / "images"
        pictures = [
            Picture(folder / f"{digest}.jpg", f"row {number}, image {place}")
            for number, row in enumerate(rows)
            for place, digest in enumerate(row.get("images") or ())
        ]
        return [picture for picture in pictures if picture.path.is_file()][:MOST_PICTURES]

    def _new(self, file: str) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the records after the position, each with the position after it.

        A last line without its newline is still being written.
        """
        path = self.directory / file
        if not path.exists():
            return
        at = self._positions.get(file, 0)
        if at > path.stat().st_size:  # another run writes into this directory
            at = 0
        with path.open("rb") as lines:
            lines.seek(at)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                at += len(line)
                for record in run_directory.parse([line]):
                    yield record, at

    @property
    def _file(self) -> Path:
        return self.directory / DIRECTORY / f"{self.name}.json"

    def _move(self, file: str, position: int) -> None:
        self._positions[file] = position
        self._file.parent.mkdir(exist_ok=True)
        run_directory.write_json(self._file, self._positions)


def bounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose texts, also those of lists as JSON, have at most MOST_CHARACTERS."""
    return {name: _bounded(value) for name, value in row.items()}


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        text = value
    elif isinstance(value, list | dict):
        text = json.dumps(value, ensure_ascii=False)
    else:
        return value
    if len(text) <= MOST_CHARACTERS:
        return value
    return f"{text[:MOST_CHARACTERS]}... ({len(text) - MOST_CHARACTERS} more characters)"


def _metrics(record: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if name not in _NO_METRICS and isinstance(value, int | float)
    }
