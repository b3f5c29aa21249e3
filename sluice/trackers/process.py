"""The process of a tracker: `python -P process.py DIRECTORY POSITION SETTINGS LIMIT`.

It follows the run directory until its standard input ends, which happens too when the trainer is
killed. Then it sends what is left, within LIMIT seconds (0: no limit), and ends.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Another interpreter need not have sluice. Its own packages come first.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from sluice.trackers.following import Follower
from sluice.trackers.run import Picture, Run, Tracker

POLL_SECONDS = 1.0
# Limit of sending what is left of a run that has ended: a library whose server is gone must not
# hold up a pod.
FINISH_SECONDS = 60
# `type` -> module here, and the class in it.
_CLASSES = {
    "wandb": ("sluice.trackers.weights_and_biases", "WeightsAndBiases"),
    "mlflow": ("sluice.trackers.mlflow", "MLflow"),
    "trackio": ("sluice.trackers.trackio", "Trackio"),
    "swanlab": ("sluice.trackers.swanlab", "SwanLab"),
}


class _MetricsFirst:
    """A tracker whose tables, pictures and files may fail or be missing.

    Its metrics are worth more.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.log = tracker.log

    def log_samples(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        self._try("log_samples", f"no {name} of step {step}", name, rows, step)

    def log_pictures(self, name: str, pictures: list[Picture], step: int) -> None:
        self._try("log_pictures", f"no {name} of step {step}", name, pictures, step)

    def log_file(self, path: Path) -> None:
        self._try("log_file", f"{path.name} was not sent", path)

    def close(self) -> None:
        if close := getattr(self._tracker, "close", None):
            close()

    def _try(self, method: str, consequence: str, *arguments: Any) -> None:
        call = getattr(self._tracker, method, None)
        if call is None:
            return
        try:
            call(*arguments)
        except Exception as error:  # libraries raise errors of many kinds
            print(f"{consequence}: {type(error).__name__}: {error}", flush=True)


def main(arguments: list[str]) -> int:
    directory, position, settings = Path(arguments[0]), arguments[1], json.loads(arguments[2])
    # The end of standard input is what ends this process, so that it can send what is left.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(10)
    follower = Follower(directory, position, settings["sampleEverySteps"])
    try:
        tracker = _MetricsFirst(_start(settings, _run(directory, settings)))
        while not _ended(POLL_SECONDS):
            follower.pass_on(tracker)
        signal.alarm(int(arguments[3]))
        follower.pass_on(tracker)
        follower.pass_on_files(tracker)
        tracker.close()
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is not installed for {sys.executable}: install it there, or name "
            "another interpreter in telemetry.trackers[].python",
            flush=True,
        )
        return 1
    except Exception as error:  # libraries raise errors of many kinds
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    return 0


def _start(settings: dict[str, Any], run: Run) -> Tracker:
    """Start the tracker, of a library or of the user. Raises what those raise."""
    if settings.get("function"):
        from sluice.runtime import user_code

        tracker: Tracker = user_code.load(settings["function"])(run)
        return tracker
    module, name = _CLASSES[settings["type"]]
    made: Tracker = getattr(importlib.import_module(module), name)(run)
    return made


def _run(directory: Path, settings: dict[str, Any]) -> Run:
    return Run(
        project=settings["project"],
        name=settings["name"],
        identity=settings["identity"],
        config=json.loads((directory / "job.json").read_text())["spec"],
        directory=directory,
        args=settings["args"],
    )


def _ended(seconds: float) -> bool:
    """Wait that long for the end of standard input."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
