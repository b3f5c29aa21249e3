"""The kind cluster of `make kind-up`, as far as a machine without docker can tell.

Programs that record how they are called replace docker, kind, kubectl and helm: the
script's order, its images and its arguments are tested, not what those programs do. `make
test-kind` does that, on a machine that has them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.helm import CHART, environment, find_object, load
from tests.helm import helm as real_helm
from tests.pod_security import violations
from tests.tools import ROOT

KIND = ROOT / "tests" / "kind"
STANDIN = """#!/bin/sh
cat > /dev/null
echo "$(basename "$0") $*" >> "$CALLS"
if [ "$(basename "$0") $1 $2" = "kind get clusters" ]; then echo "$THERE"; fi
"""
Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the script; what it called."""
    for name in ("docker", "kind", "kubectl", "helm"):
        (tmp_path / name).write_text(STANDIN)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"

    def script(command: str, there: str = "", **variables: str) -> list[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        env = (
            os.environ
            | {"PATH": path, "CALLS": str(calls), "THERE": there, "PYTHON": "true"}
            | variables
        )
        subprocess.run(
            [KIND / "kind.sh", command],
            check=True,
            env=env,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        return calls.read_text().splitlines()

    return script


def wanted_images() -> set[str]:
    """All that the chart runs with the cluster's values."""
    done = real_helm("template", "sluice", CHART, "--values", KIND / "values.yaml")
    manifests = [manifest for manifest in YAML(typ="safe").load_all(done.stdout) if manifest]
    (container,) = find_object(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    of_jobs = {
        value for name, value in environment(manifests).items() if name.startswith("SLUICE_IMAGE_")
    }
    return {container["image"]} | of_jobs


def test_the_configuration_is_one_that_kind_reads() -> None:
    """Kind's v1alpha4, field by field."""
    config = load((KIND / "cluster.yaml").read_text())
    assert (config["kind"], config["apiVersion"]) == ("Cluster", "kind.x-k8s.io/v1alpha4")
    assert config.keys() <= {
        "kind",
        "apiVersion",
        "name",
        "nodes",
        "networking",
        "featureGates",
        "runtimeConfig",
    }
    assert [node["role"] for node in config["nodes"]] == ["control-plane"]


def test_every_image_of_the_chart_is_built_and_loaded(run: Run) -> None:
    calls = run("up")
    built = {
        line.split("--tag ")[1].split()[0] for line in calls if line.startswith("docker build ")
    }
    loaded = {line.split()[3] for line in calls if line.startswith("kind load docker-image ")}
    assert built == loaded == wanted_images()
    assert all(line.endswith("--name sluice") for line in calls if line.startswith("kind load"))


def test_targets_are_those_of_the_dockerfile(run: Run) -> None:
    stages = {
        line.split()[-1]
        for line in (ROOT / "docker/Dockerfile").read_text().splitlines()
        if " AS " in line
    }
    targets = {
        line.split("--target ")[1].split()[0]
        for line in run("up")
        if line.startswith("docker build ")
    }
    assert targets <= stages


def test_up_makes_the_cluster_before_it_loads_and_installs_last(run: Run) -> None:
    calls = run("up")
    order = [line.split()[:2] for line in calls if not line.startswith("docker")]
    assert order == [
        ["kind", "get"],
        ["kind", "create"],
        *[["kind", "load"]] * 3,
        ["helm", "upgrade"],
    ]


def test_a_cluster_that_is_there_is_taken(run: Run) -> None:
    calls = run("up", there="sluice", IMAGES="built")
    assert not [line for line in calls if line.startswith(("kind create", "docker"))]
    assert "kind export kubeconfig --name sluice" in calls


def test_the_tests_get_no_kubelet_and_then_real_pods(run: Run) -> None:
    calls = run("test", IMAGES="built")
    first = [
        line.split()[:2]
        for line in calls
        if line.split()[1] in ("cordon", "uncordon", "upgrade", "test")
    ]
    assert first == [
        ["kubectl", "cordon"],
        ["kubectl", "uncordon"],
        ["helm", "upgrade"],
        ["helm", "test"],
    ]
    assert calls[-1].endswith("--for=condition=Succeeded --timeout=30m rljob/quickstart")


def test_its_own_pod_is_restricted() -> None:
    documents = list(YAML(typ="safe").load_all((KIND / "data.yaml").read_text()))
    (pod,) = [document for document in documents if document["kind"] == "Pod"]
    assert violations(pod, "restricted") == []


def test_the_makefile_calls_it() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "kind-up", "kind-down"], cwd=ROOT, capture_output=True, text=True
    )
    assert "tests/kind/kind.sh up" in done.stdout
    assert "tests/kind/kind.sh down" in done.stdout
