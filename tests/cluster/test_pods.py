"""Pods and their guards as the API server stores them, and messages if a pod cannot start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from tests.cluster.conftest import CRDS
from tests.cluster.operators import Operator
from tests.cluster.world import Object, World, now

VOLCANO = "scheduling.volcano.sh/v1beta1"
TRAINER = "demo-trainer-0-1-0"


async def report(world: World, pod: str, **status: Any) -> None:
    """Write the status of a pod, as a kubelet or a scheduler does."""
    await world.api.merge(path("Pod", world.namespace, pod, "status"), {"status": status})


async def waits(world: World, pod: str, container: str, reason: str, message: str) -> None:
    state = {"waiting": {"reason": reason, "message": message}}
    status = {
        "name": container,
        "image": "x",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": state,
    }
    await report(world, pod, phase="Pending", containerStatuses=[status])


async def says(world: World, kind: str, text: str) -> Object:
    """Wait until a condition's message holds a text."""

    async def said() -> bool:
        return text in (await world.condition(kind)).get("message", "")

    await world.until(said)
    return await world.condition(kind)


async def has(world: World, kind: str, *names: str, group_version: str = "") -> None:
    """Wait until exactly these objects are there."""

    async def there() -> bool:
        objects = (await world.api.get(collection(kind, world.namespace, group_version)))[
            "items"
        ] or []
        return sorted(stored["metadata"]["name"] for stored in objects) == sorted(names)

    await world.until(there)


# -- what guards the pods
# ---------------------------------------------------------------------------------------------


async def test_the_api_server_keeps_the_probes(operator: Operator, world: World) -> None:
    await world.create()
    await world.until_pods(5)
    for pod in (await world.pods()).values():
        for container in pod["spec"]["containers"]:
            assert container["readinessProbe"]["httpGet"]["path"] in ("/readyz", "/health")


async def test_a_network_policy_comes_with_the_job_and_goes_when_it_is_not_wanted(
    operator: Operator, world: World
) -> None:
    job = await world.create()
    await has(world, "NetworkPolicy", "demo-ingress")
    (policy,) = (await world.api.get(collection("NetworkPolicy", world.namespace)))["items"]
    assert policy["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    assert peers[1]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": world.namespace
    }
    written = policy["metadata"]["resourceVersion"]
    await world.change({"networkPolicy": {"metricsFrom": [{"podSelector": {}}]}})

    async def is_changed() -> bool:
        current = await world.api.get(path("NetworkPolicy", world.namespace, "demo-ingress"))
        return bool(current["metadata"]["resourceVersion"] != written)

    await world.until(is_changed)
    await world.change({"networkPolicy": {"enabled": False}})
    await has(world, "NetworkPolicy")
    assert len(await world.names()) == 5


async def test_a_job_has_a_budget_or_is_told_that_the_api_server_knows_none(
    operator: Operator, world: World
) -> None:
    """policy/v1 is there from Kubernetes 1.21."""
    await world.running(5)
    try:
        await world.api.get(collection("PodDisruptionBudget", world.namespace))
    except errors.MissingApiError:
        assert "ApiMissing" in await world.reasons()
        return
    await has(world, "PodDisruptionBudget", "demo-rollout")
    await world.change({"rollout": {"replicas": 1}})
    await has(world, "PodDisruptionBudget")


async def test_a_pod_has_the_grace_of_its_template(operator: Operator, world: World) -> None:
    await world.running(5, trainer={"template": {"spec": {"terminationGracePeriodSeconds": 900}}})
    await world.bind(TRAINER)
    await world.change({"suspend": True})

    async def is_ending() -> bool:
        return "deletionTimestamp" in (await world.pods("trainer"))[TRAINER]["metadata"]

    await world.until(is_ending)
    assert (await world.pods("trainer"))[TRAINER]["metadata"]["deletionGracePeriodSeconds"] == 900


# -- queues
# --------------------------------------------------------------------------------------------------


@pytest.fixture
async def volcano(api: Api) -> AsyncIterator[None]:
    """The API of Volcano, without Volcano."""
    group, version = VOLCANO.split("/")
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    spec = {
        "group": group,
        "scope": "Namespaced",
        "names": {
            "kind": "PodGroup",
            "plural": "podgroups",
            "singular": "podgroup",
            "listKind": "PodGroupList",
        },
        "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
    }
    name = f"podgroups.{group}"
    body = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
    }
    await api.create(CRDS, body | {"spec": spec})
    yield
    await api.delete(f"{CRDS}/{name}", {})


@pytest.mark.usefixtures("volcano")
async def test_volcano_gets_a_group_for_the_job_and_one_for_each_attempt_of_a_further_engine(
    operator: Operator, world: World
) -> None:
    job = await world.running(
        6, trainer={"nodes": 2}, podGroupPolicy={"volcano": {"queue": "team-a"}}
    )
    whole = f"demo-group-{job['metadata']['uid'][:8]}-1"
    await has(world, "PodGroup", whole, "demo-rollout-1-1", group_version=VOLCANO)
    at = path("PodGroup", world.namespace, whole, group_version=VOLCANO)
    group = await world.api.get(at)
    assert group["spec"]["minMember"] == 3
    await world.gone("demo-rollout-1-1-0")
    await has(world, "PodGroup", whole, "demo-rollout-1-2", group_version=VOLCANO)
    await world.gone(TRAINER)
    await world.until_pods(2, "trainer")
    await world.until(lambda: are_of_attempt(world, 2))
    assert (await world.api.get(at))["metadata"]["uid"] == group["metadata"]["uid"]


async def are_of_attempt(world: World, attempt: int) -> bool:
    return await world.names("trainer") == [
        f"demo-trainer-0-{attempt}-0",
        f"demo-trainer-0-{attempt}-1",
    ]


async def test_a_job_for_a_queue_that_is_not_there_is_told(
    operator: Operator, world: World
) -> None:
    await world.create(podGroupPolicy={"native": {}})
    await says(world, "Running", "the API server does not have this API")
    assert "ApplyFailed" in await world.reasons()


async def test_pods_that_kueue_evicts_come_back_to_their_group(
    operator: Operator, world: World
) -> None:
    await world.running(
        5, podGroupPolicy={"kueue": {"queueName": "team-a"}}, failurePolicy={"maxRestarts": 0}
    )
    group = (await world.pods())[TRAINER]["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"]
    condition = {
        "type": "TerminationTarget",
        "status": "True",
        "reason": "WorkloadEvicted",
        "lastTransitionTime": now(),
    }
    await report(world, TRAINER, conditions=[condition])

    async def is_replaced() -> bool:
        await world.gone(TRAINER)
        return await world.names("trainer") == ["demo-trainer-0-2-0"]

    await world.until(is_replaced)
    labels = (await world.pods())["demo-trainer-0-2-0"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/pod-group-name"] == group
    assert (await world.status())["restarts"] == 0


# -- pods that cannot start
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "message", "cure"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "nowhere/trainer:1"', "imagePullSecrets"),
        (
            "CreateContainerConfigError",
            'secret "hf" not found',
            "create the missing object in the job's namespace",
        ),
    ],
)
async def test_a_container_that_its_kubelet_refuses(
    operator: Operator, world: World, reason: str, message: str, cure: str
) -> None:
    await world.create(startupDeadlineSeconds=6)
    await world.until_pods(5)
    await waits(world, TRAINER, "trainer", reason, message)
    running = await says(world, "Running", f"{TRAINER} (trainer): {reason}: {message}")
    assert cure in running["message"]
    failure = (await world.status())["lastFailure"]
    assert (failure["pod"], failure["container"], failure["reason"]) == (TRAINER, "trainer", reason)
    await world.until_state("Failed")
    failed = await world.condition("Failed")
    assert failed["reason"] == "StartupDeadlineExceeded"
    assert cure in failed["message"]


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        (
            "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            "no node has enough free nvidia.com/gpu",
        ),
        ('persistentvolumeclaim "models" not found', "create the PersistentVolumeClaim models"),
    ],
)
async def test_a_pod_that_no_node_can_take(
    operator: Operator, world: World, message: str, cure: str
) -> None:
    await world.create(startupDeadlineSeconds=6)
    await world.until_pods(5)
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    await report(world, TRAINER, conditions=[condition])
    await says(world, "Running", cure)
    status = await world.until_state("Failed")
    assert (status["lastFailure"]["pod"], status["lastFailure"]["reason"]) == (
        TRAINER,
        "Unschedulable",
    )
    assert cure in status["lastFailure"]["message"]


async def test_a_container_that_used_too_much_memory_again_and_again(
    operator: Operator, world: World
) -> None:
    await world.running(5, failurePolicy={"rolloutBackoffSeconds": 30})
    for name in await world.names("rollout"):
        end = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": now()}
        status = {"name": "engine", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
        await report(world, name, containerStatuses=[status | {"state": {"terminated": end}}])
    running = await says(world, "Running", "OOMKilled")
    assert running["reason"] == "Restarting"
    assert "raise spec.rollout.resources.limits.memory" in running["message"]
    failure = (await world.status())["lastFailure"]
    assert (failure["container"], failure["reason"], failure["exitCode"]) == (
        "engine",
        "OOMKilled",
        137,
    )
