"""A run directory as a trainer leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sluice.telemetry import run_directory
from tests.unit.operator.world import make_job

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "1 + 1?"}], "response": "2", "reward": 1.0},
    {"prompt": "2 + 2?", "response": "5", "reward": None},
]


def make_run(directory: Path, **telemetry: Any) -> Path:
    """Write a run's manifest and samples of step 1 and an evaluation; no records yet."""
    job = make_job(telemetry=telemetry)
    run_directory.write_json(
        directory / run_directory.JOB, job.model_dump(mode="json", by_alias=True, exclude_none=True)
    )
    (directory / "samples").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name in ("step_0000001", "eval_digits_0000002"):
        (directory / "samples" / f"{name}.jsonl").write_text(lines)
    return directory


def add_step(directory: Path, step: int, **metrics: float) -> None:
    record = {"step": step, "attempt": 1, "time": 0.0, "rollout/raw_reward": step / 4, **metrics}
    run_directory.append(directory / run_directory.METRICS, record)


def add_evaluation(directory: Path, version: int, reward: float) -> None:
    record = {"version": version, "dataset": "digits", "time": 0.0, "eval/digits": reward}
    run_directory.append(directory / run_directory.EVALUATION, record)


def add_picture(directory: Path) -> None:
    """Give the first sample of step 1 an image with its thumbnail."""
    from PIL import Image

    folder = directory / "samples/images"
    folder.mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / "aa.jpg")
    rows = [ROWS[0] | {"images": ["aa"]}, *ROWS[1:]]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "samples/step_0000001.jsonl").write_text(lines)
