"""The files that a run writes as it goes, read as they grow."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

from sluice.telemetry import run_directory

Record = dict[str, Any]
RECENT_STEPS = 20
"""Steps that tell how long the next ones take."""


class Growing:
    """A file of JSON Lines that somebody appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[Record]:
        """New records since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return list(run_directory.parse(whole.splitlines()))


class RunFiles:
    """Metrics, evaluations and samples of a run. steps: the last record of each step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.steps: dict[int, Record] = {}
        self._metrics = Growing(directory / run_directory.METRICS)
        self._evaluation = Growing(directory / run_directory.EVALUATION)
        self._evaluations: dict[int, dict[str, float]] = {}
        self._sample: tuple[int, Record | None] = (0, None)

    def read(self) -> list[Record]:
        """New records of steps since the last call."""
        fresh = self._metrics.read()
        self.steps |= {int(record["step"]): record for record in fresh}
        for record in self._evaluation.read():
            name = record["dataset"]
            of_version = self._evaluations.setdefault(int(record["version"]), {})
            of_version[name] = float(record[f"eval/{name}"])
        return fresh

    def last(self) -> Record:
        """The record of the newest step; empty: there is none."""
        return self.steps[max(self.steps)] if self.steps else {}

    def evaluations(self) -> list[float]:
        """The mean over all data sets, by version."""
        return [mean(by_set.values()) for _, by_set in sorted(self._evaluations.items())]

    def sample(self) -> Record | None:
        """A sample of the newest step: `prompt`, `response`, `label`, `reward`."""
        step = max(self.steps, default=0)
        if step != self._sample[0]:
            path = self.directory / "samples" / f"step_{step:07d}.jsonl"
            self._sample = (step, next(run_directory.records(path), None))
        return self._sample[1]

    def seconds_left(self, step: int, total: int) -> float | None:
        """By what the newest steps took, each with its waiting; None: no step is done.

        The time of a restart is in one step alone, and so does not lengthen all that are to come.
        """
        newest = [self.steps[each] for each in sorted(self.steps)[-RECENT_STEPS:]]
        times = [float(record["perf/step_time"]) for record in newest if "perf/step_time" in record]
        return median(times) * max(total - step, 0) if times else None
