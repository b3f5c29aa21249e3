"""The chart's life on a real API server: install, upgrade, uninstall, and what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from tests.cluster.conftest import install_crds
from tests.cluster.control_plane import ControlPlane
from tests.cluster.releases import (
    CRD,
    POOLS_CRD,
    Release,
    age_arguments,
    make_namespace,
    new_release,
)
from tests.cluster.world import World, new_world
from tests.helm import CHART, VALUES, helm, load
from tests.tools import tool

ANNOTATION = "helm.sh/resource-policy"


@pytest.fixture
async def release(plane: ControlPlane) -> AsyncIterator[Release]:
    """A release of the chart with its CRDs, on a cluster that belongs to the tests."""
    if plane.directory is None:
        pytest.skip("installs and deletes the CRD: not on the cluster of KUBECONFIG")
    async with await Api.connect() as api:
        await delete_crds(api)
        async with new_release(api) as fresh:
            yield fresh
        await delete_crds(api)


async def delete_crds(api: Api) -> None:
    """Delete the CRDs, and wait until they are gone with all jobs and pools."""
    for crd in (CRD, POOLS_CRD):
        with contextlib.suppress(errors.NotFoundError):
            await api.delete(crd, {})
            async with asyncio.timeout(30):
                while True:
                    await api.get(crd)
                    await asyncio.sleep(0.1)


@pytest.fixture
async def world(release: Release) -> AsyncIterator[World]:
    async with new_world(release.api, f"{release.name}-jobs") as fresh:
        yield fresh


async def established(api: Api) -> None:
    async with asyncio.timeout(20):
        while True:
            conditions = (await api.get(CRD)).get("status", {}).get("conditions", [])
            if any(
                condition["type"] == "Established" and condition["status"] == "True"
                for condition in conditions
            ):
                await asyncio.sleep(1)  # the API server takes up a new schema after a moment
                return
            await asyncio.sleep(0.1)


async def test_install_brings_the_crd_and_the_operator(release: Release, world: World) -> None:
    release.install()
    await established(release.api)
    assert (await release.deployment())["spec"]["replicas"] == 2
    await world.create()
    with pytest.raises(errors.InvalidError, match=r"spec\.algorithm\.estimator"):
        await world.create("bad", algorithm={"estimator": "guess"})


async def test_upgrade_changes_values_and_the_crd(
    release: Release, world: World, tmp_path: Path
) -> None:
    """The CRD of the old chart lacks a column and a field.

    Helm never upgrades a CRD in crds/, so the chart has it as a template.
    """
    old = tmp_path / "sluice"
    shutil.copytree(CHART, old)
    file = old / "files" / "rljobs.sluice.dev.yaml"
    text = file.read_text()
    column = "    - name: Reward\n      type: string\n      jsonPath: .status.reward\n"
    assert column in text
    file.write_text(text.replace(column, ""))
    release.install(chart=old)
    await established(release.api)
    job = await world.create()
    release.upgrade("--set", "replicas=3,lease.seconds=20")
    current = load((CHART / "files" / "rljobs.sluice.dev.yaml").read_text())["spec"]["versions"][0]
    (version,) = (await release.api.get(CRD))["spec"]["versions"]
    assert version["additionalPrinterColumns"] == current["additionalPrinterColumns"]
    deployment = await release.deployment()
    assert deployment["spec"]["replicas"] == 3
    env = {
        variable["name"]: variable.get("value")
        for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert env["SLUICE_LEASE_SECONDS"] == "20"
    assert (await world.job())["metadata"]["uid"] == job["metadata"]["uid"]


async def test_uninstall_keeps_the_crd_and_the_jobs_and_a_new_install_takes_them_over(
    release: Release, world: World
) -> None:
    release.install()
    await established(release.api)
    job = await world.create()
    release.uninstall()
    with pytest.raises(errors.NotFoundError):
        await release.deployment()
    for path in ("clusterroles", "clusterrolebindings"):
        with pytest.raises(errors.NotFoundError):
            await release.api.get(
                f"/apis/rbac.authorization.k8s.io/v1/{path}/{release.name}-sluice-operator"
            )
    assert (await release.api.get(CRD))["metadata"]["annotations"][ANNOTATION] == "keep"
    assert (await world.job())["metadata"]["uid"] == job["metadata"]["uid"]
    release.install()
    assert (await world.job())["metadata"]["uid"] == job["metadata"]["uid"]


async def test_giving_up_the_crd_on_an_upgrade_keeps_it(release: Release) -> None:
    release.install()
    release.upgrade("--set", "crds.install=false")
    for crd in (CRD, POOLS_CRD):
        assert (await release.api.get(crd))["metadata"]["annotations"][ANNOTATION] == "keep"


async def test_a_crd_of_kubectl_is_taken_over_only_when_asked(release: Release) -> None:
    await install_crds(release.api)
    refused = release.helm("install")
    assert "invalid ownership metadata" in refused.stderr
    release.helm("uninstall", "--ignore-not-found")
    release.install("--take-ownership")
    assert (await release.api.get(CRD))["metadata"]["annotations"][ANNOTATION] == "keep"


def kubectl(*words: str, text: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [tool("kubectl"), *words, "--filename=-"], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("values", ["defaults", "namespaces", "everything"])
async def test_the_server_accepts_every_object(api: Api, values: str) -> None:
    """All but those whose kinds belong to the operators of Prometheus and Grafana."""
    for namespace in ("sluice-system", "team-a", "team-b"):
        await make_namespace(api, namespace)
    foreign = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards.grafanaOperator")
    without = [f"metrics.{item}.enabled=false" for item in foreign]
    settings = ",".join([*without, "crds.install=false"])
    rendered = helm(
        "template",
        "dry",
        CHART,
        "--namespace",
        "sluice-system",
        "--values",
        VALUES / f"{values}.yaml",
        "--validate",
        *await age_arguments(api),
        "--set",
        settings,
    )
    assert rendered.returncode == 0, rendered.stderr
    accounts = [
        item for item in rendered.stdout.split("---\n") if "\nkind: ServiceAccount\n" in item
    ]
    kubectl("apply", text="---\n".join(accounts))  # without its account a pod is not admitted
    try:
        done = kubectl("apply", "--dry-run=server", text=rendered.stdout)
    finally:
        kubectl("delete", text="---\n".join(accounts))  # helm does not adopt objects of others
    assert done.stdout.count("server dry run") == rendered.stdout.count("\nkind: ")
