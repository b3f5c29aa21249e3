"""MLflow. MLFLOW_TRACKING_URI and others configure its library."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from sluice.trackers.formats import metric_name, parameters
from sluice.trackers.run import Picture, Run

IDENTITY = "sluice.identity"
# Limits of a call of the server.
_MOST_PARAMS, _MOST_METRICS = 100, 1000


class MLflow:
    """A run of MLflow, found again by a tag."""

    def __init__(self, run: Run) -> None:
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        number = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        )
        found = self._client.search_runs([number], f"tags.`{IDENTITY}` = '{run.identity}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {key: str(value) for key, value in run.args.items()} | {IDENTITY: run.identity}
        self._id = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        params = [Param(name, text) for name, text in parameters(run.config)]
        for part in _parts(params, _MOST_PARAMS):
            self._client.log_batch(self._id, params=part)
        self._client.log_dict(self._id, run.config, "job.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        values = [Metric(metric_name(name), value, now, step) for name, value in metrics.items()]
        for part in _parts(values, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def log_samples(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._client.log_text(self._id, lines, f"{metric_name(name)}/{step:07d}.jsonl")

    def log_pictures(self, name: str, pictures: list[Picture], step: int) -> None:
        folder = f"{metric_name(name)}/{step:07d}"
        for picture in pictures:
            self._client.log_artifact(self._id, str(picture.path), folder)

    def log_file(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))
