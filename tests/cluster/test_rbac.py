"""The operator with exactly the rights of the chart, and what the chart's roles allow people."""

from __future__ import annotations

import asyncio

import pytest

from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection
from tests.cluster.conftest import StartUnder
from tests.cluster.releases import Release
from tests.cluster.world import World

RBAC = "/apis/rbac.authorization.k8s.io/v1"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
# A namespace that is being deleted, such as those of earlier tests, accepts no new objects.
ENDING = "because it is being terminated"


@pytest.mark.usefixtures("garbage_collector")
@pytest.mark.parametrize("mode", ["cluster", "namespaces"])
async def test_a_job_lives_and_nothing_is_forbidden(
    release: Release, start_under: StartUnder, world: World, mode: str
) -> None:
    watched = [] if mode == "cluster" else ["--set", f"watchNamespaces={{{world.namespace}}}"]
    release.install("--set", "crds.install=false,replicas=0", *watched)
    operator = await start_under(release)
    await world.running(5)
    pods = await world.names()
    assert await has_policy(world)
    await world.change({"networkPolicy": {"enabled": False}})
    await world.until(lambda: has_no_policy(world))
    await world.change({"suspend": True})
    await world.until_state("Suspended")
    await world.until_pods(0)
    await world.change({"suspend": False})
    await world.until_pods(len(pods))
    await world.run()
    await world.finish("demo-rollout-0-2-0", 1, "error: out of memory", container="engine")
    await world.until(lambda: has_pod(world, "demo-rollout-0-3-0"))
    await world.delete()
    await world.until(lambda: nothing_is_left(world), 60)
    await world.running(5, ttlSecondsAfterFinished=1, suspend=False)
    await world.finish("demo-trainer-0-1-0", 0)
    await world.until(lambda: no_job_is_left(world), 60)
    await world.until(lambda: is_told_of(world, "Suspended", "Resumed", "TrainerSucceeded"))
    refusals = [
        line for line in operator.log.read_text().splitlines() if "forbidden" in line.lower()
    ]
    elsewhere = [line for line in refusals if ENDING in line and world.namespace not in line]
    assert refusals == elsewhere
    assert elsewhere or 'code="403"' not in operator.get("/metrics")[1]


async def has_policy(world: World) -> bool:
    return bool((await world.api.get(collection("NetworkPolicy", world.namespace)))["items"])


async def has_no_policy(world: World) -> bool:
    return not await has_policy(world)


async def is_told_of(world: World, *reasons: str) -> bool:
    return {*reasons} <= await world.reasons()


async def has_pod(world: World, name: str) -> bool:
    return name in await world.names()


async def nothing_is_left(world: World) -> bool:
    return not await world.owned()


async def no_job_is_left(world: World) -> bool:
    return not await world.objects("RLJob")


async def test_the_operator_may_do_no_more_than_its_work(release: Release, world: World) -> None:
    release.install("--set", f"crds.install=false,replicas=0,watchNamespaces={{{world.namespace}}}")
    account = f"system:serviceaccount:{release.namespace}:{release.name}-sluice"
    own, elsewhere = world.namespace, "default"
    assert await allowed(
        release.api,
        account,
        own,
        "list pods",
        "create secrets",
        "patch rljobs/status",
        "watch rlenginepools",
        "patch rlenginepools/status",
        "patch statefulsets",
    )
    assert await refused(
        release.api,
        account,
        own,
        "get secrets",
        "list secrets",
        "patch secrets",
        "delete configmaps",
        "create pods/exec",
        "get pods/log",
        "create rljobs",
        "patch rljobs",
        "create rlenginepools",
        "patch rlenginepools",
        "delete rlenginepools",
        "delete statefulsets",
        "list statefulsets",
        "create serviceaccounts/token",
        "create rolebindings",
        "get leases",
    )
    assert await refused(
        release.api, account, elsewhere, "list pods", "list rljobs", "create pods", "create secrets"
    )
    assert await refused(
        release.api, account, release.namespace, "list secrets", "list pods", "delete leases"
    )
    key = f"{release.name}-sluice-key"
    assert await may(release.api, account, release.namespace, "get secrets", key)
    assert not await may(release.api, account, release.namespace, "get secrets", "another")


VIEW = [
    "get rljobs",
    "list rljobs",
    "watch rljobs",
    "get rljobs/status",
    "list rlenginepools",
    "get rlenginepools/status",
    "list pods",
    "get pods/log",
]
EDIT = [
    "create rljobs",
    "patch rljobs",
    "delete rljobs",
    "patch rljobs/scale",
    "update rljobs/scale",
    "create rlenginepools",
    "patch rlenginepools",
    "delete rlenginepools",
    "patch rlenginepools/scale",
]
MEND = ["patch rljobs/status", "patch rlenginepools/status"]
NEVER = ["get secrets", "create pods", "delete pods", "create pods/exec", "create rolebindings"]
MAY = {"viewer": VIEW, "editor": VIEW + EDIT, "admin": VIEW + EDIT + MEND}
JOINS = {"viewer": "view", "editor": "edit", "admin": "admin"}


@pytest.mark.parametrize("role", MAY)
async def test_people_may_do_what_their_role_says_and_not_more(
    release: Release, world: World, role: str
) -> None:
    release.install("--set", "crds.install=false,replicas=0")
    await bind(release.api, world.namespace, f"{release.name}-sluice-{role}", "eve")
    assert await allowed(release.api, "eve", world.namespace, *MAY[role])
    others = [item for item in VIEW + EDIT + MEND if item not in MAY[role]]
    assert await refused(release.api, "eve", world.namespace, *others, *NEVER)
    assert await refused(release.api, "eve", "default", *VIEW)


@pytest.mark.usefixtures("garbage_collector")
@pytest.mark.parametrize("role", MAY)
async def test_the_clusters_own_roles_take_them_in(
    release: Release, world: World, role: str
) -> None:
    """Aggregation is work of the controller manager."""
    release.install("--set", "crds.install=false,replicas=0")
    await bind(release.api, world.namespace, JOINS[role], "eve")

    async def is_in() -> bool:
        return await allowed(release.api, "eve", world.namespace, *MAY[role])

    await world.until(is_in)
    others = [item for item in EDIT + MEND if item not in MAY[role]]
    assert await refused(release.api, "eve", world.namespace, *others)


async def bind(api: Api, namespace: str, role: str, user: str) -> None:
    body = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"{role}-{user}", "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }
    await api.create(f"{RBAC}/namespaces/{namespace}/rolebindings", body)
    await asyncio.sleep(0.3)  # the authorizer reads bindings from a watch


async def allowed(api: Api, user: str, namespace: str, *deeds: str) -> bool:
    return [deed for deed in deeds if not await may(api, user, namespace, deed)] == []


async def refused(api: Api, user: str, namespace: str, *deeds: str) -> bool:
    return [deed for deed in deeds if await may(api, user, namespace, deed)] == []


GROUPS = {
    "rljobs": "sluice.dev",
    "rlenginepools": "sluice.dev",
    "leases": "coordination.k8s.io",
    "statefulsets": "apps",
    "rolebindings": "rbac.authorization.k8s.io",
}


async def may(api: Api, user: str, namespace: str, deed: str, name: str = "") -> bool:
    """The answer of `kubectl auth can-i VERB RESOURCE --as=USER`."""
    verb, resource = deed.split()
    resource, _, subresource = resource.partition("/")
    attributes = {
        "namespace": namespace,
        "verb": verb,
        "group": GROUPS.get(resource, ""),
        "resource": resource,
    }
    attributes |= {"subresource": subresource, "name": name}
    groups = (
        ["system:serviceaccounts", "system:authenticated"]
        if ":" in user
        else ["system:authenticated"]
    )
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }
    return bool((await api.create(REVIEWS, body))["status"]["allowed"])
