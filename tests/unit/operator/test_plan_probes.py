"""Probes: the questions of a kubelet to our containers."""

from typing import Any

import pytest

from sluice_operator.plan.facts.model import Gang, Images
from sluice_operator.plan.manifests.containers import probes
from sluice_operator.plan.manifests.pods import pod
from tests.unit.operator.world import make_job


@pytest.mark.parametrize("container", ["buffer", "rendezvous", "worker"])
def test_services_and_workers_are_asked_at_their_metrics_port(container: str) -> None:
    rendered = probes(make_job(), container)
    paths = {
        kind: (probe["httpGet"]["port"], probe["httpGet"]["path"])
        for kind, probe in rendered.items()
    }
    assert paths == {
        "startupProbe": ("metrics", "/healthz"),
        "readinessProbe": ("metrics", "/readyz"),
        "livenessProbe": ("metrics", "/healthz"),
    }


def test_a_trainer_is_never_killed_for_its_silence() -> None:
    assert list(probes(make_job(), "trainer")) == ["readinessProbe"]


@pytest.mark.parametrize(("timeout", "at_least"), [(10, 600), (300, 600), (1200, 2400)])
def test_an_engine_outlives_every_pause_for_an_update(timeout: int, at_least: int) -> None:
    liveness = probes(make_job(weightSync={"timeoutSeconds": timeout}), "engine")["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= at_least
    assert liveness["httpGet"]["path"] == "/health"


@pytest.mark.parametrize(
    ("role", "size", "index"), [("rollout", 1, 0), ("rollout", 2, 1), ("trainer", 1, 0)]
)
def test_every_container_says_when_it_is_ready_at_a_port_that_it_has(
    role: Any, size: int, index: int
) -> None:
    rendered = pod(make_job(), Gang(role, 0, size), 1, index, "10.0.0.1:7700", Images())
    for container in rendered["spec"]["containers"]:
        ports = {port["name"] for port in container["ports"]}
        assert container["readinessProbe"]["httpGet"]["port"] in ports


def test_a_template_may_change_or_remove_a_probe() -> None:
    patch = {"name": "engine", "livenessProbe": None, "startupProbe": {"failureThreshold": 9}}
    job = make_job(rollout={"template": {"spec": {"containers": [patch]}}})
    engine = pod(job, Gang("rollout", 0, 1), 1, 0, "10.0.0.1:7700", Images())["spec"]["containers"][
        0
    ]
    assert "livenessProbe" not in engine
    assert engine["startupProbe"]["failureThreshold"] == 9
    assert engine["startupProbe"]["httpGet"]["path"] == "/health"
