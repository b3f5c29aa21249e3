"""Tests against a real API server.

There is no kubelet; the tests write through the API what a kubelet would write.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from sluice.api import API_VERSION, KIND
from sluice.api.schema.crd import KINDS
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.namespace_lock import ALWAYS, NAME
from sluice_operator.cluster.kube.paths import collection, path
from tests.cluster.control_plane import (
    ROOT,
    ControlPlane,
    control_plane,
    rules_server,
    write_kubeconfig,
)
from tests.cluster.operators import Operator
from tests.cluster.releases import Object, Release, new_release
from tests.cluster.world import SPEC, World, new_world
from tests.tools import missing

RULES = "x-kubernetes-validations"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
StartOperator = Callable[..., Awaitable[Operator]]
StartUnder = Callable[[Release], Awaitable[Operator]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    with control_plane() as cluster:
        os.environ["KUBECONFIG"] = cluster.kubeconfig
        yield cluster


@pytest.fixture
def garbage_collector(plane: ControlPlane) -> None:
    """For tests of what an owner's deletion takes along."""
    if not plane.collects:
        missing("needs a control plane with kube-controller-manager")


@pytest.fixture
async def api(plane: ControlPlane) -> AsyncIterator[Api]:
    """With the CRDs in place."""
    async with await Api.connect() as client:
        await install_crds(client)
        with contextlib.suppress(
            errors.NotFoundError
        ):  # an operator of all namespaces that was killed has left it
            await client.delete(path("Lease", ALWAYS, NAME), {})
        yield client


@pytest.fixture(scope="session")
def ruled(plane: ControlPlane) -> str:
    """Return the kubeconfig of an API server with CEL rules: the plane's, or a second one."""
    return plane.kubeconfig if asyncio.run(keeps_rules()) else rules_server(plane)


@pytest.fixture
async def rules(ruled: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """Return an API server that enforces the rules of RLJobs.

    No operator sees its objects unless it is the API server of the plane.
    """
    monkeypatch.setenv("KUBECONFIG", ruled)
    async with await Api.connect() as client:
        await install_crds(client)
        yield client


@pytest.fixture
async def unruled(api: Api) -> AsyncIterator[None]:
    """Let the plane's API server accept what the CRD's rules refuse.

    An API server that is older than CEL rules does so.
    """
    async with without_rules(api):
        yield


@asynccontextmanager
async def without_rules(api: Api) -> AsyncIterator[None]:
    """Lift the rules of RLJobs; they are back at the end."""
    path = f"{CRDS}/rljobs.sluice.dev"
    versions = (await api.get(path))["spec"]["versions"]
    await api.merge(path, {"spec": {"versions": _without(versions, RULES)}})
    try:
        await _until_senseless_jobs_are(api, taken=True)
        yield
    finally:
        await api.merge(path, {"spec": {"versions": versions}})
        await _until_senseless_jobs_are(api, taken=RULES not in str(versions))


async def _until_senseless_jobs_are(api: Api, *, taken: bool) -> None:
    """An API server takes up a new schema after a moment."""
    jobs = collection("RLJob", "default")
    spec = {**SPEC, "trainer": {**SPEC["trainer"], "stepsPerBatch": 7}}
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "senseless"},
        "spec": spec,
    }
    async with asyncio.timeout(30):
        while True:
            try:
                await api.create(jobs, body)
            except errors.InvalidError:
                was_taken = False
            else:
                was_taken = True
                await api.delete(f"{jobs}/senseless", {})
            if was_taken == taken:
                return
            await asyncio.sleep(0.1)


def _without(value: Any, field: str) -> Any:
    """The value without this field, at any depth."""
    if isinstance(value, dict):
        return {name: _without(item, field) for name, item in value.items() if name != field}
    return [_without(item, field) for item in value] if isinstance(value, list) else value


async def keeps_rules() -> bool:
    """The API server of KUBECONFIG keeps the rules of a CRD: it is of Kubernetes 1.25 or later."""
    async with await Api.connect() as api:
        await install_crds(api)
        return RULES in str(await api.get(f"{CRDS}/rljobs.sluice.dev"))


async def install_crds(api: Api) -> None:
    """And wait until they are served."""
    for kind in KINDS:
        # Most tests find them there. To read one takes half a second, and as long at the server.
        if await _is_served(api, kind.name):
            continue
        crd = YAML(typ="safe").load((ROOT / f"crds/sluice.dev_{kind.plural}.yaml").read_text())
        with contextlib.suppress(errors.AlreadyExistsError):
            await api.create(CRDS, crd)
        async with asyncio.timeout(30):
            while not await _is_served(api, kind.name):
                await asyncio.sleep(0.1)


async def _is_served(api: Api, kind: str) -> bool:
    try:
        await api.get(collection(kind, "default"))
    except errors.NotFoundError:
        return False
    return True


@pytest.fixture
async def world(api: Api) -> AsyncIterator[World]:
    """A namespace of the test's own."""
    async with new_world(api, f"t-{uuid.uuid4().hex[:8]}") as fresh:
        yield fresh


@pytest.fixture
async def start(plane: ControlPlane, world: World, tmp_path: Path) -> AsyncIterator[StartOperator]:
    """Starts operators for the test's namespace; all are ended after it."""
    started: list[Operator] = []

    async def start_one(kubeconfig: str = plane.kubeconfig, **variables: str) -> Operator:
        log = tmp_path / f"operator-{len(started)}.log"
        started.append(Operator(kubeconfig, world.namespace, log, **variables))
        return await started[-1].ready()

    yield start_one
    for operator in started:
        operator.kill()
    for operator in started:
        print(operator.log.read_text())


@pytest.fixture
async def operator(start: StartOperator) -> Operator:
    return await start()


@pytest.fixture
async def release(api: Api) -> AsyncIterator[Release]:
    async with new_release(api) as fresh:
        yield fresh


@pytest.fixture
async def start_under(plane: ControlPlane, api: Api, tmp_path: Path) -> AsyncIterator[StartUnder]:
    """Starts an operator with the service account, and the environment, of an installed release."""
    started: list[Operator] = []

    async def start(release: Release) -> Operator:
        pod = (await release.deployment())["spec"]["template"]["spec"]
        accounts = f"/api/v1/namespaces/{release.namespace}/serviceaccounts"
        account = f"{accounts}/{pod['serviceAccountName']}/token"
        request: Object = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {},
        }
        token = (await api.create(account, request))["status"]["token"]
        kubeconfig = tmp_path / "kubeconfig"
        write_kubeconfig(Path(plane.kubeconfig), kubeconfig, token)
        env = {
            variable["name"]: variable.get("value", "")
            for variable in pod["containers"][0]["env"]
            if "valueFrom" not in variable
        }
        ours = ("SLUICE_HTTP_PORT", "SLUICE_LEASE_SECONDS", "SLUICE_PROBE_SECONDS")
        variables = {name: value for name, value in env.items() if name not in ours}
        started.append(
            Operator(str(kubeconfig), release.namespace, tmp_path / "operator.log", **variables)
        )
        return await started[-1].ready()

    yield start
    for operator in started:
        operator.kill()
        print(operator.log.read_text())
