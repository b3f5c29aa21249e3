"""targets.json of a run directory: its pods as a Prometheus finds them (`file_sd_configs`), with
the labels that a cluster's PodMonitor gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sluice_operator.cluster.local.pod import LocalPod
from sluice_operator.cluster.local.translate import LOOPBACK
from sluice_operator.plan.facts.names import LABEL_JOB, LABEL_REPLICA, LABEL_ROLE

TARGETS_FILE = "targets.json"
_ENGINE = {"__metrics_path__": "/engine/metrics", "metrics_path": "/engine/metrics"}
"""Labels. The path is shown, too: else a worker's two targets would share their series `up`."""


def of_pods(pods: Iterable[LocalPod]) -> list[dict[str, Any]]:
    """Target groups of the pods that run, in the order of their names."""
    return [group for pod in sorted(pods, key=lambda each: each.name) for group in _groups(pod)]


def _groups(pod: LocalPod) -> Iterator[dict[str, Any]]:
    if pod.ended or "metrics" not in pod.ports:
        return
    metadata = pod.manifest["metadata"]
    labels = {
        "job": metadata["labels"][LABEL_JOB],
        "namespace": metadata["namespace"],
        "role": metadata["labels"][LABEL_ROLE],
        "replica": metadata["labels"][LABEL_REPLICA],
        "pod": pod.name,
    }
    targets = [f"{LOOPBACK}:{pod.ports['metrics']}"]
    yield {"targets": targets, "labels": labels}
    if labels["role"] == "rollout":
        yield {"targets": targets, "labels": labels | _ENGINE}


def write(directory: Path, groups: list[dict[str, Any]]) -> None:
    """Replace the file as a whole, since Prometheus reads it whenever it changes."""
    path = directory / TARGETS_FILE
    text = json.dumps(groups, indent=2) + "\n"
    if path.exists() and path.read_text() == text:
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)
