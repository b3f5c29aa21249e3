"""Prints what a tracker's library has stored of a run, as JSON: run by the interpreter that has it.

    python tracked.py wandb|mlflow|trackio|swanlab PLACE

The metrics are [name, step, value]; `samples` are the names under which there are samples, and
`pictures` those of their pictures.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

Found = dict[str, list[Any]]


def wandb(place: str) -> Found:
    """Read a file of W&B, LevelDB's log of protobuf records after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    metrics: list[Any] = []
    samples: list[str] = []
    for file in sorted(Path(place).glob("wandb/offline-run-*/run-*.wandb")):
        for data in _level_db(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            values = {
                tuple(i.nested_key) or (i.key,): json.loads(i.value_json)
                for i in record.history.item
            }
            step = values[("step",)]
            metrics += [
                [name, step, value]
                for (name, *rest), value in values.items()
                if not rest and name != "step" and not name.startswith("_")
            ]
            samples += [name for name, *rest in values if rest == ["_type"]]
    files = [file.name for file in Path(place).glob("wandb/offline-run-*/files/*")]
    return _found(metrics, samples, files)


def _found(metrics: list[Any], samples: list[str], files: list[str]) -> Found:
    pictures = [name for name in samples if name.startswith("samples/pictures")]
    return {"metrics": metrics, "samples": samples, "pictures": pictures, "files": files}


def _level_db(data: bytes) -> list[bytes]:
    records, at, part = [], 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(part)
            part = b""
    return records


def mlflow(place: str) -> Found:
    from mlflow import MlflowClient

    client = MlflowClient(place)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    metrics = [
        [metric.key, metric.step, metric.value]
        for run in runs
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]
    entries = [entry for run in runs for entry in client.list_artifacts(run.info.run_id)]
    step = "samples/pictures/0000001"
    return {
        "metrics": metrics,
        "samples": [entry.path for entry in entries if entry.is_dir],
        "files": [entry.path for entry in entries if not entry.is_dir],
        "pictures": [e.path for run in runs for e in client.list_artifacts(run.info.run_id, step)],
        "runs": [[run.info.run_name, run.info.status, run.data.params] for run in runs],
    }


def trackio(place: str) -> Found:
    metrics: list[Any] = []
    samples: list[str] = []
    for file in Path(place).glob("*.db"):
        rows = sqlite3.connect(file).execute("select step, metrics from metrics order by id")
        for step, values in rows:
            for name, value in json.loads(values).items():
                if isinstance(value, dict):
                    samples.append(name)
                else:
                    metrics.append([name, step, value])
    return _found(metrics, samples, [file.name for file in Path(place).rglob("*.json")])


def swanlab(place: str) -> Found:
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    metrics: list[Any] = []
    samples: list[str] = []
    for file in sorted(Path(place).glob("swanlog/*/run-*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = record_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "scalar":
                metrics.append([record.scalar.key, record.scalar.step, record.scalar.value.number])
            elif record.WhichOneof("record_type") == "media":
                samples.append(record.media.key)
    files = [file.name for file in Path(place).glob("swanlog/**/*.json")]
    return _found(metrics, samples, files)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
