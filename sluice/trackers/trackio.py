"""Trackio. TRACKIO_SPACE_ID, TRACKIO_DIR and others configure its library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio

from sluice.trackers.formats import table
from sluice.trackers.run import Picture, Run


class Trackio:
    """A run of Trackio. It knows runs by name alone, so the name ends with the run's identity."""

    def __init__(self, run: Run) -> None:
        self._run = trackio.init(
            **{
                "project": run.project,
                "name": f"{run.name}-{run.identity[:6]}",
                "config": run.config,
                "resume": "allow",
                "embed": False,
                **run.args,
            }
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        columns, cells = table(rows)
        self._run.log({name: trackio.Table(columns=columns, data=cells)}, step=step)

    def log_pictures(self, name: str, pictures: list[Picture], step: int) -> None:
        for number, picture in enumerate(pictures):
            image = trackio.Image(picture.path, caption=picture.caption)
            self._run.log({f"{name}/{number}": image}, step=step)

    def log_file(self, path: Path) -> None:
        trackio.save(path, project=self._run.project)

    def close(self) -> None:
        self._run.finish()
