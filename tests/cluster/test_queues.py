"""Jobs that share a queue's quota, admitted by stand-ins for Kueue and Volcano (queues.py)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJob, RLJobStatus
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.cluster import KubeCluster
from sluice_operator.cluster.kube.kueue import Workloads
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.plan import Deletion, Observed
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.report.admission import cause, workload_of
from tests.cluster.conftest import CRDS
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import Operator
from tests.cluster.queues import (
    BY_DEFAULT_QUEUE,
    BY_WEBHOOK,
    POD_GROUPS,
    WORKLOADS,
    Kueue,
    Queue,
    Volcano,
    bound,
    stateful_set_webhook,
)
from tests.cluster.test_pools import Pools
from tests.cluster.world import Object, World
from tests.tools import missing

POLICIES: dict[str, Object] = {
    "kueue": {
        "podGroupPolicy": {"kueue": {"queueName": "team-a"}},
        "podTemplateOverrides": [BY_WEBHOOK],
    },
    "volcano": {"podGroupPolicy": {"volcano": {"queue": "team-a"}}},
}
QUEUES: dict[str, type[Queue]] = {"kueue": Kueue, "volcano": Volcano}
ONE_ENGINE = {"replicas": 1}
# Pods of a job with one engine that queue: with Kueue all, else trainer and engine.
WHOLE_JOB = {"kueue": 4, "volcano": 2}


@pytest.fixture(params=list(POLICIES))
async def policy(request: pytest.FixtureRequest, api: Api) -> AsyncIterator[str]:
    """The queue's API is there while it is used."""
    kind = {
        "kueue": custom_kind(WORKLOADS, "Workload"),
        "volcano": custom_kind(POD_GROUPS, "PodGroup"),
    }[request.param]
    await api.create(CRDS, kind)
    yield request.param
    await api.delete(f"{CRDS}/{kind['metadata']['name']}", {})


def custom_kind(group_version: str, kind: str) -> Object:
    group, version = group_version.split("/")
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    names = {
        "kind": kind,
        "plural": f"{kind.lower()}s",
        "singular": kind.lower(),
        "listKind": f"{kind}List",
    }
    versions = [{"name": version, "served": True, "storage": True, "schema": schema}]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names['plural']}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"},
        },
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": versions},
    }


async def submit(world: World, policy: str, name: str, **spec: Any) -> None:
    await world.create(name, **({**POLICIES[policy], "rollout": ONE_ENGINE} | spec))


def pod_of(job: str, role: str, attempt: int = 1, replica: int = 0) -> str:
    """The pod of a gang of one."""
    return f"{job}-{role}-{replica}-{attempt}-0"


async def runs(world: World, *pods: str) -> None:
    """Wait until all of them run."""

    async def all_run() -> bool:
        current = await world.pods()
        return all(current.get(pod, {}).get("status", {}).get("phase") == "Running" for pod in pods)

    await world.until(all_run)


async def whole_job_runs(world: World, job: str, attempt: int = 1) -> None:
    await runs(world, pod_of(job, "trainer", attempt), pod_of(job, "rollout", attempt))


async def waits(world: World, job: str, attempt: int = 1) -> None:
    """Wait until trainer and engine exist, and some time more in which neither may start."""
    expected = {pod_of(job, "trainer", attempt), pod_of(job, "rollout", attempt)}

    async def are_there() -> bool:
        return expected <= {*await world.names()}

    await world.until(are_there)
    await asyncio.sleep(1)
    pods = await world.pods()
    assert not any(bound(pods[pod]) for pod in expected)


async def has_none(world: World, job: str, *roles: str) -> None:
    """Wait until the job has no pods of these roles any more."""

    async def are_gone() -> bool:
        return not any(
            name.startswith(f"{job}-{role}") for name in await world.names() for role in roles
        )

    await world.until(are_gone, 60)


async def group_of(world: World, pod: str) -> str:
    return str((await world.pods())[pod]["metadata"]["labels"]["sluice.dev/pod-group"])


async def delete_pod(world: World, pod: str) -> None:
    await world.api.delete(path("Pod", world.namespace, pod), {})


async def finishes(world: World, job: str, attempt: int = 1) -> None:
    await world.finish(pod_of(job, "trainer", attempt), 0)
    await world.until_state("Succeeded", job)


async def test_a_job_whose_trainer_is_lost_gets_its_place_back_before_another_job_begins(
    operator: Operator, world: World, policy: str
) -> None:
    """Admitted separately, the engine of the waiting job would take the trainer's place.

    Both jobs would wait for ever.
    """
    async with QUEUES[policy](world, quota=WHOLE_JOB[policy]).working():
        await submit(world, policy, "first")
        await whole_job_runs(world, "first")
        await submit(world, policy, "second")
        await waits(world, "second")
        await delete_pod(world, pod_of("first", "trainer"))
        await runs(world, pod_of("first", "trainer", attempt=2))
        assert await group_of(world, pod_of("first", "trainer", 2)) == await group_of(
            world, pod_of("first", "rollout")
        )
        await waits(world, "second")
        await finishes(world, "first", attempt=2)
        await whole_job_runs(world, "second")
        await finishes(world, "second")


@pytest.mark.parametrize("policy", ["kueue"], indirect=True)
async def test_a_queue_for_all_pods_of_a_namespace_takes_nothing_from_a_job_that_runs(
    operator: Operator, world: World, policy: str
) -> None:
    """Admitted separately, services of waiting jobs would take the place of a lost service.

    All jobs would wait for each other.
    """
    overrides = {"podTemplateOverrides": [BY_WEBHOOK, BY_DEFAULT_QUEUE]}
    async with Kueue(world, quota=WHOLE_JOB[policy] + 1, has_default=True).working():
        await submit(world, policy, "first", **overrides)
        await whole_job_runs(world, "first")
        for name in ("second", "third"):
            await submit(world, policy, name, **overrides)
            await waits(world, name)
        for role, attempt in (("buffer", 1), ("rendezvous", 1), ("buffer", 2)):
            await delete_pod(world, pod_of("first", role, attempt))
            await runs(world, pod_of("first", role, attempt + 1))
        await finishes(world, "first")
        await whole_job_runs(world, "second")
        await waits(world, "third")


async def test_an_engine_above_min_replicas_is_admitted_or_not_to_nobodys_harm(
    operator: Operator, world: World, policy: str
) -> None:
    further = pod_of("first", "rollout", replica=1)
    queue = QUEUES[policy](world, quota=WHOLE_JOB[policy] - 1)
    async with queue.working():
        await submit(world, policy, "first", rollout={"replicas": 2})
        await waits(world, "first")
        assert further not in await world.names(), (
            "it would be admitted in the place of the job itself"
        )
        queue.quota = WHOLE_JOB[policy]
        await whole_job_runs(world, "first")
        await world.until_pods(2, "rollout")
        assert not bound((await world.pods())[further])
        await world.change({"rollout": {"replicas": 1}}, "first")
        await has_none(world, "first", "rollout-1")
        await world.change({"rollout": {"replicas": 2}}, "first")
        queue.quota = WHOLE_JOB[policy] + 1
        await runs(world, pod_of("first", "rollout", attempt=2, replica=1))
        await delete_pod(world, pod_of("first", "rollout"))
        await runs(world, pod_of("first", "rollout", attempt=2))
        await finishes(world, "first")
        await has_none(world, "first", "rollout")


async def test_a_suspended_job_gives_its_place_to_another_and_queues_again(
    operator: Operator, world: World, policy: str
) -> None:
    async with QUEUES[policy](world, quota=WHOLE_JOB[policy]).working():
        await submit(world, policy, "first")
        await whole_job_runs(world, "first")
        before = await group_of(world, pod_of("first", "trainer"))
        await submit(world, policy, "second")
        await waits(world, "second")
        await world.change({"suspend": True}, "first")
        await whole_job_runs(world, "second")
        await has_none(world, "first", "trainer", "rollout")
        await world.change({"suspend": False}, "first")
        await waits(world, "first", attempt=2)
        assert await group_of(world, pod_of("first", "trainer", 2)) != before
        await finishes(world, "second")
        await whole_job_runs(world, "first", attempt=2)


async def test_a_job_that_is_suspended_or_deleted_while_it_waits_leaves_nothing(
    operator: Operator, world: World, policy: str, garbage_collector: None
) -> None:
    """The pods never ran. Kueue would keep them, and their place in the queue, for ever."""
    async with QUEUES[policy](world, quota=0).working():
        for name in ("first", "second"):
            await submit(world, policy, name)
            await waits(world, name)
        await world.change({"suspend": True}, "first")
        await has_none(world, "first", "trainer", "rollout")
        await world.delete("second")
        await has_none(world, "second", "trainer", "rollout")


async def test_a_job_that_is_deleted_while_it_runs_gives_its_place_back(
    operator: Operator, world: World, policy: str, garbage_collector: None
) -> None:
    async with QUEUES[policy](world, quota=WHOLE_JOB[policy]).working():
        await submit(world, policy, "first")
        await whole_job_runs(world, "first")
        await submit(world, policy, "second")
        await waits(world, "second")
        await world.delete("first")
        await whole_job_runs(world, "second")
        await has_none(world, "first", "trainer", "rollout")


@contextlib.contextmanager
def without_controllers(plane: ControlPlane) -> Iterator[None]:
    """Stop the controllers, so that the objects of a deleted namespace stay."""
    manager = plane.processes.get("kube-controller-manager")
    if manager is None:
        missing("needs a control plane whose controllers a test may stop")
    manager.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        manager.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("policy", ["kueue"], indirect=True)
async def test_a_namespace_that_is_deleted_keeps_no_pods_of_jobs(
    operator: Operator, world: World, policy: str, plane: ControlPlane
) -> None:
    """Since Kubernetes 1.33 the pods of a namespace are deleted before the rest.

    So no job has a deletion timestamp yet.
    """
    kueue = Kueue(world, quota=WHOLE_JOB[policy])
    async with kueue.working():
        await submit(world, policy, "first")
        await whole_job_runs(world, "first")
        await submit(world, policy, "second")
        await waits(world, "second")
        with without_controllers(plane):
            await world.api.delete(f"/api/v1/namespaces/{world.namespace}", {})
            await world.api.delete(collection("Pod", world.namespace), {})
            await world.until_pods(0)
            assert not (await world.job("first"))["metadata"].get("deletionTimestamp")
            assert kueue.admitted == {}


@pytest.mark.parametrize("policy", ["kueue"], indirect=True)
async def test_a_group_that_kueue_evicts_comes_back_as_the_same_group(
    operator: Operator, world: World, policy: str
) -> None:
    kueue = Kueue(world, quota=WHOLE_JOB[policy])
    async with kueue.working():
        await submit(world, policy, "first", failurePolicy={"maxRestarts": 0})
        await whole_job_runs(world, "first")
        group = await group_of(world, pod_of("first", "trainer"))
        kueue.quota = 0
        await kueue.evict(group)
        await waits(world, "first", attempt=2)
        kueue.quota = WHOLE_JOB[policy]
        await whole_job_runs(world, "first", attempt=2)
        assert await group_of(world, pod_of("first", "trainer", 2)) == group
        assert (await world.status("first"))["restarts"] == 0


@pytest.mark.parametrize("policy", ["kueue"], indirect=True)
async def test_a_pod_that_is_removed_from_a_dead_node_is_replaced(
    operator: Operator, world: World, policy: str
) -> None:
    """Kueue keeps the pod's object.

    While its status says that it runs, neither Kueue nor the next attempt counts it as gone.
    """
    trainer = pod_of("first", "trainer")
    await submit(world, policy, "first")
    await world.until_pods(4)
    await Kueue(world, quota=0).start((await world.pods())[trainer])
    await world.run(trainer)
    await delete_pod(world, trainer)
    kube = KubeCluster(world.api, "test", JobKeys(bytes(32)), world.namespace)
    await kube.prime([world.namespace])
    job = RLJob.model_validate({**await world.job("first"), "status": None})
    assert pod_of("first", "trainer", attempt=2) not in await world.names()
    await kube.delete(job, [Deletion("Pod", trainer, 0)])

    async def is_replaced() -> bool:
        return {trainer, pod_of("first", "trainer", attempt=2)} <= {*await world.names()}

    await world.until(is_replaced)
    assert (await world.pods())[trainer]["status"]["phase"] == "Failed"


@pytest.mark.parametrize("policy", ["volcano"], indirect=True)
async def test_a_job_that_waits_says_why_and_fails_of_it_when_it_has_waited_too_long(
    operator: Operator, world: World, policy: str
) -> None:
    async with Volcano(world, quota=1).working():
        await submit(world, policy, "first", queueTimeoutSeconds=6)
        await world.until_state("Queued", "first")
        words = f"{pod_of('first', 'trainer')}: 2/2 tasks in gang unschedulable"
        await world.until(lambda: says(world, "Running", words))
        await world.until_state("Failed", "first")
        failed = await world.condition("Failed", "first")
        assert failed["reason"] == "QueueTimeoutExceeded"
        assert (
            failed["message"] == f"the job waited in a queue for 6 s (queueTimeoutSeconds): {words}"
        )
        await has_none(world, "first", "trainer", "rollout")


async def says(world: World, kind: str, words: str) -> bool:
    return words in (await world.condition(kind, "first")).get("message", "")


@pytest.mark.parametrize("policy", ["kueue"], indirect=True)
async def test_the_words_of_kueue_are_read_from_the_workload(
    operator: Operator, world: World, policy: str
) -> None:
    """The API server may drop the gates of pods, by which the operator sees the wait."""
    async with Kueue(world, quota=WHOLE_JOB[policy] - 1).working():
        await submit(world, policy, "first")
        await waits(world, "first")
        pods = [*(await world.pods()).values()]
        for pod in pods:
            pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
        job = RLJob.model_validate({**await world.job("first"), "status": None})
        words = "insufficient unused quota for pods, 1 more needed"

        async def are_read() -> bool:
            objects = await Workloads(world.api).waited_for(job, pods)
            observed = Observed(tuple(pods), objects=objects)
            return cause(JobPass(job, RLJobStatus(), observed, datetime.now(UTC))) == words

        await world.until(are_read)


@pytest.mark.parametrize("policy", ["kueue"], indirect=True)
async def test_the_workload_of_a_pod_that_kueue_queues_apart_is_found_by_its_owner(
    operator: Operator, world: World, policy: str
) -> None:
    """Kueue makes its name up."""
    async with Kueue(world, quota=0, has_default=True).working():
        await world.create("first", podTemplateOverrides=[BY_WEBHOOK], rollout=ONE_ENGINE)
        await world.until_pods(4)
        buffer = (await world.pods())[pod_of("first", "buffer")]
        buffer["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
        job = RLJob.model_validate({**await world.job("first"), "status": None})

        async def is_found() -> bool:
            objects = await Workloads(world.api).waited_for(job, [buffer])
            return workload_of(buffer, objects) is not None

        await world.until(is_found)


async def test_a_pool_is_admitted_as_a_whole_and_resized_through_zero(
    plane: ControlPlane,
    operator: Operator,
    world: World,
    api: Api,
    garbage_collector: None,
    tmp_path: Path,
) -> None:
    if plane.directory is None:
        pytest.skip("the API server of KUBECONFIG does not reach a webhook of this test")
    kind = custom_kind(WORKLOADS, "Workload")
    await api.create(CRDS, kind)
    pools, queue = Pools(world), Kueue(world, quota=1)
    try:
        async with stateful_set_webhook(world, tmp_path), queue.working():
            await pools.create(kueue={"queueName": "engines"})
            await pools.until_ready_is("False", "0 of 2 engines answer")
            assert not any(map(bound, (await world.pods("engine")).values()))
            queue.quota = 3
            await pools.until_status(engines="2/2")
            # The engines go on, and the pool says what Kueue does.
            await pools.change(replicas=3)
            await pools.until_ready_is("False", "spec.replicas: Invalid value: 3")
            await pools.until_told("ApplyFailed")
            assert all(map(bound, (await world.pods("engine")).values()))
            await pools.change(replicas=0)
            await pools.until_pods(0)
            await pools.change(replicas=3)
            await pools.until_status(engines="3/3")
            await pools.until_ready_is("True", "3 of 3 engines answer")
    finally:
        await api.delete(f"{CRDS}/{kind['metadata']['name']}", {})
