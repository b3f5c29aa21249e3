"""Read the files of a run while the run writes them."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

from sluice.telemetry import run_directory

Record = dict[str, Any]
# Newest steps whose durations give the time left.
RECENT_STEPS = 20


class JsonlTail:
    """A JSON Lines file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[Record]:
        """Return the records that were added since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        return list(run_directory.parse(complete.splitlines()))


class RunFiles:
    """Metrics, evaluations and samples of a run.

    `steps` holds the metrics of each step. If a step was trained twice, they are the newest.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.steps: dict[int, Record] = {}
        self._metrics = JsonlTail(directory / run_directory.METRICS)
        self._evaluation = JsonlTail(directory / run_directory.EVALUATION)
        self._evaluations: dict[int, dict[str, float]] = {}
        self._sample: tuple[int, Record | None] = (0, None)

    def read(self) -> list[Record]:
        """Read what was added to the files; return the metrics of the new steps."""
        new_steps = self._metrics.read()
        self.steps |= {int(record["step"]): record for record in new_steps}
        for record in self._evaluation.read():
            name = record["dataset"]
            if f"eval/{name}" not in record:  # held-out rows have a loss, and no reward
                continue
            scores = self._evaluations.setdefault(int(record["version"]), {})
            scores[name] = float(record[f"eval/{name}"])
        return new_steps

    def last(self) -> Record:
        """Return the metrics of the newest step; empty before the first step."""
        return self.steps[max(self.steps)] if self.steps else {}

    def evaluations(self) -> list[float]:
        """Return the mean over all data sets for each weight version, in order."""
        return [mean(scores.values()) for _, scores in sorted(self._evaluations.items())]

    def sample(self) -> Record | None:
        """Return a sample of the newest step: `prompt`, `response`, `label`, `reward`."""
        step = max(self.steps, default=0)
        if step != self._sample[0]:
            path = self.directory / "samples" / f"step_{step:07d}.jsonl"
            self._sample = (step, next(run_directory.records(path), None))
        return self._sample[1]

    def seconds_left(self, step: int, total: int) -> float | None:
        """Estimate the time left in seconds from the newest steps; None before the first step."""
        newest = [self.steps[number] for number in sorted(self.steps)[-RECENT_STEPS:]]
        times = [float(record["perf/step_time"]) for record in newest if "perf/step_time" in record]
        # The median ignores the one step whose time includes a restart.
        return median(times) * max(total - step, 0) if times else None
