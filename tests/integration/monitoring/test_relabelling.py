"""The chart's PodMonitor, as the Prometheus operator makes a scrape of it, over the pods of a
plan: the labels that dashboards and rules build on.

What the Prometheus operator adds by itself (namespace, pod, container, and `job` from jobLabel) is
as in its documentation of the PodMonitor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.helm import objects, one
from tests.prometheus import Prometheus
from tests.unit.operator.test_plan_pods import GOLDEN

META = "__meta_kubernetes_pod_"


def snake(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name)


def escaped(label: str) -> str:
    return f"{META}label_{re.sub('[^a-zA-Z0-9_]', '_', label)}"


def scrape(monitor: dict[str, Any], endpoint: dict[str, Any], file: Path) -> dict[str, Any]:
    """One endpoint of a PodMonitor as a scrape configuration."""
    own = [
        {
            "source_labels": [META + "container_port_name"],
            "action": "keep",
            "regex": endpoint["port"],
        },
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [META + "name"], "target_label": "pod"},
        {"source_labels": [escaped(monitor["jobLabel"])], "target_label": "job", "regex": "(.+)"},
    ]
    given = [
        {snake(name): value for name, value in rule.items()} for rule in endpoint["relabelings"]
    ]
    return {
        "job_name": f"podMonitor{endpoint['path']}",
        "metrics_path": endpoint["path"],
        "file_sd_configs": [{"files": [str(file)]}],
        "relabel_configs": own + given,
    }


def discovered(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What Kubernetes' service discovery says of each port of a pod."""
    metadata = pod["metadata"]
    labels = {escaped(name): value for name, value in metadata["labels"].items()}
    labels |= {
        "__meta_kubernetes_namespace": metadata["namespace"],
        META + "name": metadata["name"],
    }
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            yield {
                "targets": [f"127.0.0.1:{port['containerPort']}"],
                "labels": labels | {META + "container_port_name": port["name"]},
            }


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    documents = YAML(typ="safe").load_all((GOLDEN / "cluster.yaml").read_text())
    pods = [each for each in documents if each["kind"] == "Pod"]
    groups = [group for pod in pods for group in discovered(pod)]
    (tmp_path / "pods.json").write_text(json.dumps(groups))
    monitor = one(objects("everything"), "PodMonitor")["spec"]
    endpoints = monitor["podMetricsEndpoints"]
    scrapes = [scrape(monitor, endpoint, tmp_path / "pods.json") for endpoint in endpoints]
    with Prometheus(tmp_path, {"scrape_configs": scrapes}) as server:
        server.until(server.targets, "aware of targets")
        yield server


def test_pods_are_scraped_under_the_labels_that_a_run_on_a_laptop_gives(
    prometheus: Prometheus,
) -> None:
    labels = [
        {name: value for name, value in each["labels"].items() if name != "instance"}
        for each in prometheus.targets()
    ]
    names = {"namespace", "job", "role", "replica", "pod"}
    assert all(each.keys() - {"metrics_path"} == names for each in labels)
    paths = {(each["role"], each.get("metrics_path", "")) for each in labels}
    roles = {"buffer", "rendezvous", "rollout", "trainer"}
    assert paths == {(role, "") for role in roles} | {("rollout", "/engine/metrics")}
    assert len({json.dumps(each, sort_keys=True) for each in labels}) == len(labels)
