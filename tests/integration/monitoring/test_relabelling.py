"""The chart's PodMonitor over the pods of a plan: the labels that dashboards and rules build on.
tests/node has it over pods that run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_operator.plan import render_all
from tests.helm import find_object, objects
from tests.pod_monitor import scrapes, write_pods
from tests.prometheus import Prometheus
from tests.unit.operator.test_plan_pods import JOBS

ENABLED = ("--set", "metrics.podMonitor.enabled=true")


@pytest.fixture
def prometheus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Prometheus]:
    """Scrapes the pods of one of JOBS, which the test names as a parameter."""
    file = tmp_path / "pods.json"
    write_pods((pod for pod in render_all(JOBS[request.param]) if pod["kind"] == "Pod"), file)
    monitor = find_object(objects("defaults", *ENABLED), "PodMonitor", "sluice-jobs")["spec"]
    with Prometheus(tmp_path, {"scrape_configs": scrapes(monitor, file)}) as server:
        server.until(server.targets, "aware of targets")
        yield server


@pytest.mark.parametrize("prometheus", ["pool"], indirect=True)
def test_an_engine_of_a_pool_is_not_scraped_by_way_of_each_of_its_jobs(
    prometheus: Prometheus,
) -> None:
    paths = {
        (target["labels"]["role"], target["labels"].get("metrics_path", ""))
        for target in prometheus.targets()
    }
    assert paths == {(role, "") for role in ("buffer", "rendezvous", "rollout", "trainer")}


@pytest.mark.parametrize("prometheus", ["cluster"], indirect=True)
def test_pods_are_scraped_under_the_labels_that_a_run_on_a_laptop_gives(
    prometheus: Prometheus,
) -> None:
    labels = [
        {name: value for name, value in target["labels"].items() if name != "instance"}
        for target in prometheus.targets()
    ]
    names = {"namespace", "job", "role", "replica", "pod"} | {"container", "endpoint"}
    assert all(target_labels.keys() - {"metrics_path"} == names for target_labels in labels)
    paths = {
        (target_labels["role"], target_labels.get("metrics_path", "")) for target_labels in labels
    }
    roles = {"buffer", "rendezvous", "rollout", "trainer"}
    assert paths == {(role, "") for role in roles} | {("rollout", "/engine/metrics")}
    assert len({json.dumps(target_labels, sort_keys=True) for target_labels in labels}) == len(
        labels
    )
