"""A PodMonitor as the Prometheus operator makes scrapes of it, and pods as Kubernetes' service
discovery tells of them: Debian's Prometheus is built without that, so it reads both from files.

What the Prometheus operator adds by itself (selection, namespace, container, pod, endpoint, and
`job` from jobLabel) is as in its documentation of the PodMonitor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Object = dict[str, Any]
META = "__meta_kubernetes_pod_"
ENDED = "Failed|Succeeded"


def scrapes(monitor: Object, file: Path) -> list[Object]:
    """Scrape configurations of a PodMonitor's spec, one for each endpoint. file: the pods."""
    return [_scrape(monitor, endpoint, file) for endpoint in monitor["podMetricsEndpoints"]]


def _scrape(monitor: Object, endpoint: Object, file: Path) -> Object:
    rules = [
        *_selection(monitor),
        {
            "source_labels": [f"{META}container_port_name"],
            "action": "keep",
            "regex": endpoint["port"],
        },
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [f"{META}container_name"], "target_label": "container"},
        {"source_labels": [f"{META}name"], "target_label": "pod"},
        {
            "source_labels": [_label(monitor["jobLabel"])],
            "target_label": "job",
            "regex": "(.+)",
        },
        {"target_label": "endpoint", "replacement": endpoint["port"]},
    ]
    rules += _rules(endpoint["relabelings"])
    return {
        "job_name": f"podMonitor{endpoint['path']}",
        "metrics_path": endpoint["path"],
        "file_sd_configs": [{"files": [str(file)]}],
        "relabel_configs": rules,
        "metric_relabel_configs": _rules(endpoint.get("metricRelabelings", [])),
    }


def _rules(relabelings: Iterable[Object]) -> list[Object]:
    return [{_snake(name): value for name, value in rule.items()} for rule in relabelings]


def _selection(monitor: Object) -> Iterator[Object]:
    assert monitor["namespaceSelector"] == {"any": True}
    yield {"source_labels": [f"{META}phase"], "action": "drop", "regex": ENDED}
    for condition in monitor["selector"]["matchExpressions"]:
        if condition["operator"] == "In":
            name, values = _label(condition["key"]), "|".join(condition["values"])
        else:
            assert condition["operator"] == "Exists"
            name, values = _label(condition["key"], "labelpresent"), "true"
        yield {"source_labels": [name], "action": "keep", "regex": values}


def _snake(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name)


def _label(name: str, kind: str = "label") -> str:
    return f"{META}{kind}_{re.sub('[^a-zA-Z0-9_]', '_', name)}"


def write_pods(pods: Iterable[Object], file: Path) -> None:
    """Write the targets of service discovery: one for each port of each pod."""
    file.write_text(json.dumps([target for pod in pods for target in _targets(pod)]))


def _targets(pod: Object) -> Iterator[Object]:
    metadata, status = pod["metadata"], pod.get("status", {})
    labels = {
        "__meta_kubernetes_namespace": metadata["namespace"],
        f"{META}name": metadata["name"],
        f"{META}phase": status.get("phase", "Pending"),
    }
    for name, value in metadata["labels"].items():
        labels |= {_label(name): value, _label(name, "labelpresent"): "true"}
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            yield {
                "targets": [f"{status.get('podIP', '127.0.0.1')}:{port['containerPort']}"],
                "labels": labels
                | {
                    f"{META}container_name": container["name"],
                    f"{META}container_port_name": port["name"],
                },
            }
