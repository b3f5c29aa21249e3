"""SwanLab. SWANLAB_API_KEY, SWANLAB_MODE and others configure its library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import swanlab

from sluice.trackers.run import Picture, Run


class SwanLab:
    """A run of SwanLab. It has no tables: samples are texts."""

    def __init__(self, run: Run) -> None:
        self._run = swanlab.init(
            **{
                "project": run.project,
                "name": run.name,
                "id": run.identity,
                "resume": "allow",
                "log_dir": str(run.directory / "swanlog"),
                "config": run.config,
                **run.args,
            }
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        texts = [swanlab.Text(json.dumps(row, ensure_ascii=False, indent=1)) for row in rows]
        self._run.log({name: texts}, step=step)

    def log_pictures(self, name: str, pictures: list[Picture], step: int) -> None:
        images = [swanlab.Image(str(picture.path), caption=picture.caption) for picture in pictures]
        self._run.log({name: images}, step=step)

    def log_file(self, path: Path) -> None:
        swanlab.save(str(path), base_path=str(path.parent), policy="now")

    def close(self) -> None:
        self._run.finish()
