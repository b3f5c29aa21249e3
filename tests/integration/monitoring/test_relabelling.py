"""The chart's PodMonitors over the pods of a plan: the labels that dashboards and rules build on.
tests/node has them over pods that run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port
from sluice_operator.plan import Images, render_all
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS
from sluice_operator.plan.manifests.engine_pool import pool_objects
from tests.boards import queries
from tests.helm import find_object, objects
from tests.pod_monitor import scrapes, write_pods
from tests.prometheus import Prometheus
from tests.unit.operator.pool_world import make_pool
from tests.unit.operator.test_plan_pods import JOBS

POOL = make_pool().metadata.name
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


def engine_pod(port: int) -> dict[str, Any]:
    """Return the pod of the second engine of a pool, whose metrics this process serves."""
    made = pool_objects(make_pool(), Images(), NO_DEFAULTS)
    (template,) = [obj["spec"]["template"] for obj in made if obj["kind"] == "StatefulSet"]
    labels = template["metadata"]["labels"] | {"apps.kubernetes.io/pod-index": "1"}
    (container,) = template["spec"]["containers"]
    ports = [{"name": "http", "containerPort": port}]
    return {
        "metadata": {"namespace": "team", "name": f"{POOL}-engine-1", "labels": labels},
        "spec": {"containers": [container | {"ports": ports}]},
        "status": {"phase": "Running"},
    }


def test_metrics_of_a_pools_jobs_have_the_jobs_labels_and_answer_the_panels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of sluice's plugin; a pool's engine is asked for SGLang's in test_pool."""
    monkeypatch.syspath_prepend(str(PATH))
    registry, file, port = CollectorRegistry(), tmp_path / "pods.json", free_port()
    plugin = importlib.import_module("sluice_sglang.adapter_metrics")
    metrics_of_engine = plugin.AdapterMetrics(pool=True, registry=registry)
    asked = {
        query.name: query.filled(namespace="team", pool=POOL, interval="10s")
        for query in queries()
        if query.board == "pools" and "sglang:" not in query.expr
    }
    write_pods([engine_pod(port)], file)
    monitor = find_object(objects("defaults", *ENABLED), "PodMonitor", "sluice-pools")["spec"]
    configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": scrapes(monitor, file)}
    server, thread = start_http_server(port, "127.0.0.1", registry)
    with Prometheus(tmp_path, configuration) as prometheus:

        def unanswered() -> set[str]:
            for job, tokens in (("team/math", 30), ("team/code", 10)):
                metrics_of_engine.had(job, "prompt", tokens)
                metrics_of_engine.had(job, "generated", tokens)
            return {name for name, expr in asked.items() if not prometheus.query(expr)}

        for job in ("team/math", "team/code"):
            metrics_of_engine.loaded(job)
            metrics_of_engine.held(job, 2, 1000)
        metrics_of_engine.wait({"team/math": 5}, {"team/math": 3, "team/code": 1})
        prometheus.until(lambda: not unanswered(), f"able to answer {unanswered()}")
        share = asked["pools: Share and weight: {{job}}, by weight"]
        shares = {labels["job"]: value for labels, value in prometheus.query(share)}
        assert shares == {"math": 0.75, "code": 0.25}
        ((labels, waiting),) = prometheus.query("sluice_pool_requests_waiting > 0")
    server.shutdown()
    thread.join()
    assert waiting == 5
    assert (
        labels.items()
        >= {
            "namespace": "team",
            "pool": POOL,
            "job": "math",
            "replica": "1",
            "pod": f"{POOL}-engine-1",
        }.items()
    )
    assert "exported_job" not in labels
