"""Weights & Biases. WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY and others configure its library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from sluice.trackers.formats import table
from sluice.trackers.run import Picture, Run

INIT_SECONDS = 60.0


class WeightsAndBiases:
    """A run of W&B. Steps are the metric `step`, since its own counter takes no step again."""

    def __init__(self, run: Run) -> None:
        self._run = wandb.init(
            **{
                "project": run.project,
                "name": run.name,
                "id": os.environ.get("WANDB_RUN_ID", run.identity),
                "resume": "allow",
                "dir": run.directory,
                "config": run.config,
                "settings": wandb.Settings(init_timeout=INIT_SECONDS, console="off"),
                **run.args,
            }
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def log_samples(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        columns, cells = table(rows)
        self._run.log({name: wandb.Table(columns=columns, data=cells), "step": step})

    def log_pictures(self, name: str, pictures: list[Picture], step: int) -> None:
        images = [wandb.Image(str(picture.path), caption=picture.caption) for picture in pictures]
        self._run.log({name: images, "step": step})

    def log_file(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self) -> None:
        self._run.finish()
        # finish() returns before the library's process has written its file; teardown waits for it.
        wandb.teardown()
