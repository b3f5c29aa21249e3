"""The chart's PodMonitor over the quickstart's pods: a real Prometheus scrapes them, under the
labels that dashboards and rules build on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from observability.recording import STEP
from tests.boards import RULES
from tests.helm import find_object, objects
from tests.node.checks import START_SECONDS
from tests.node.jobs import NAME, Quickstart
from tests.pod_monitor import scrapes, write_pods
from tests.prometheus import Labels, Prometheus

pytestmark = pytest.mark.timeout(1200)
ENABLED = ("--set", "metrics.podMonitor.enabled=true")
# Role -> the container whose port `metrics` is scraped.
CONTAINERS = {
    "buffer": "buffer",
    "rendezvous": "rendezvous",
    "rollout": "worker",
    "trainer": "trainer",
}
ENGINE = "/engine/metrics"


def configuration(run: Quickstart, directory: Path) -> dict[str, Any]:
    """Over all pods of the node, those of the operator among them."""
    monitor = find_object(objects("defaults", *ENABLED), "PodMonitor", "sluice-jobs")["spec"]
    file = directory / "pods.json"
    write_pods(run.node.get("pods", "--all-namespaces")["items"], file)
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": scrapes(monitor, file),
    }


def expected(run: Quickstart, role: str, path: str = "") -> Labels:
    labels = {
        "namespace": run.namespace,
        "job": NAME,
        "role": role,
        "replica": "0",
        "pod": run.pod(role)["metadata"]["name"],
        "container": CONTAINERS[role],
        "endpoint": "metrics",
    }
    return labels | ({"metrics_path": path} if path else {})


def series(prometheus: Prometheus, expr: str) -> list[Labels]:
    """Labels of an answer, without name and address."""
    hidden = ("__name__", "instance")
    return [
        {name: value for name, value in labels.items() if name not in hidden}
        for labels, _ in prometheus.query(expr)
    ]


def place(labels: Labels) -> tuple[str, str]:
    """The order of targets: by role and path."""
    return labels["role"], labels.get("metrics_path", "")


def test_the_pods_are_scraped_under_their_labels(quickstart: Quickstart, tmp_path: Path) -> None:
    quickstart.start(trainer={"steps": 120})
    quickstart.until_step(2, START_SECONDS)
    targets = [expected(quickstart, role) for role in CONTAINERS]
    targets.append(expected(quickstart, "rollout", ENGINE))
    with Prometheus(tmp_path, configuration(quickstart, tmp_path)) as prometheus:
        prometheus.until(lambda: prometheus.query(STEP), "aware of a step")
        prometheus.until(lambda: len(prometheus.query("up == 1")) == len(targets), "all up")
        up = series(prometheus, "up")
        assert sorted(up, key=place) == sorted(targets, key=place)
        assert series(prometheus, "sluice_trainer_step") == [expected(quickstart, "trainer")]
        engine = expected(quickstart, "rollout", ENGINE)
        for labels in series(prometheus, "sglang:num_running_reqs"):
            assert engine.items() <= labels.items()
        assert prometheus.query("sglang:num_running_reqs")
        assert series(prometheus, STEP) == [{"namespace": quickstart.namespace, "job": NAME}]
