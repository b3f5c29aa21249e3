"""The operator's key, and the tokens and certificates that are derived from it."""

from __future__ import annotations

import asyncio
import base64

import pytest

from sluice.api import RLJob
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube import KubeCluster, operatorkey, owned
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.plan.manifests.objects import token_secret
from tests.cluster.conftest import StartOperator
from tests.cluster.operators import Operator
from tests.cluster.world import Object, World

KEY = "sluice-operator-key"


def text(secret: Object, name: str) -> str:
    return base64.b64decode(secret["data"][name]).decode()


async def keys_of(world: World) -> JobKeys:
    stored = await world.api.get(path("Secret", world.namespace, KEY))
    return JobKeys(base64.b64decode(stored["data"]["key"]))


async def secret_of(world: World, job: Object, what: str) -> Object:
    name = f"{job['metadata']['name']}-{what}-{job['metadata']['uid'][:8]}"
    return await world.api.get(path("Secret", world.namespace, name))


async def test_two_replicas_that_start_together_share_one_key(world: World) -> None:
    both = await asyncio.gather(
        *(operatorkey.read_or_make(world.api, world.namespace, KEY) for _ in range(2))
    )
    assert both[0].token("u") == both[1].token("u") == (await keys_of(world)).token("u")


async def test_a_secret_that_holds_no_key_is_refused(world: World) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": KEY},
        "stringData": {"key": "short"},
    }
    await world.api.create(collection("Secret", world.namespace), body)
    with pytest.raises(
        Exception, match=f"Secret {world.namespace}/{KEY}: a key of 5 bytes is too short.*delete it"
    ):
        await operatorkey.read_or_make(world.api, world.namespace, KEY)


async def test_a_jobs_token_follows_from_the_key_and_its_uid(
    operator: Operator, world: World
) -> None:
    job = await world.create()
    await world.until_pods(5)
    secret = await secret_of(world, job, "token")
    assert text(secret, "token") == (await keys_of(world)).token(job["metadata"]["uid"])
    assert secret["immutable"]
    for pod in (await world.pods()).values():
        sources = [
            entry.get("valueFrom", {})
            for container in pod["spec"]["containers"]
            for entry in container["env"]
        ]
        names = {source["secretKeyRef"]["name"] for source in sources if "secretKeyRef" in source}
        assert names == {secret["metadata"]["name"]}


async def test_with_tls_the_servers_get_a_certificate_and_all_others_the_authority(
    operator: Operator, world: World
) -> None:
    job = await world.create(tls={"enabled": True})
    await world.until_pods(5)
    secret = await secret_of(world, job, "tls")
    assert set(secret["data"]) == {"ca.crt", "tls.crt", "tls.key"}
    files = {}
    for pod in (await world.pods()).values():
        (volume,) = [item for item in pod["spec"]["volumes"] if item["name"] == "tls"]
        files[pod["metadata"]["labels"]["sluice.dev/role"]] = [
            item["path"] for item in volume["secret"]["items"]
        ]
    everything = ["ca.crt", "tls.crt", "tls.key"]
    assert files == {
        "rendezvous": everything,
        "buffer": everything,
        "rollout": ["ca.crt"],
        "trainer": ["ca.crt"],
    }


@pytest.mark.usefixtures("unruled")
async def test_tls_cannot_be_switched_while_the_job_runs(operator: Operator, world: World) -> None:
    await world.running(5)
    await world.change({"tls": {"enabled": True}})

    async def is_told() -> bool:
        return "cannot be changed: spec.tls" in (await world.condition("Running")).get(
            "message", ""
        )

    await world.until(is_told)
    assert len(await world.objects("Secret")) == 1


async def test_a_restarted_operator_takes_the_secret_that_is_there_for_its_own(
    start: StartOperator, world: World
) -> None:
    first = await start(SLUICE_IDENTITY="first")
    job = await world.running(5)
    before = await secret_of(world, job, "token")
    await asyncio.to_thread(first.end)
    second = await start(SLUICE_IDENTITY="second")
    await world.finish("demo-trainer-0-1-0", 1, "error: boom")

    async def goes_on() -> bool:
        return "demo-trainer-0-2-0" in await world.names()

    await world.until(goes_on)
    assert await secret_of(world, job, "token") == before
    assert second.metric("controller_runtime_reconcile_errors_total") == 0


async def test_a_job_of_a_name_that_was_used_before_shares_nothing_with_its_predecessor(
    operator: Operator, world: World
) -> None:
    """The old one's Secret is still there: the garbage collector takes its time."""
    first = await world.create()
    await world.until_pods(5)
    old = await secret_of(world, first, "token")
    await world.delete()
    second = await world.create()

    async def is_there() -> bool:
        try:
            await secret_of(world, second, "token")
        except errors.NotFoundError:
            return False
        return True

    await world.until(is_there)
    new = await secret_of(world, second, "token")
    assert text(new, "token") != text(old, "token")
    assert new["metadata"]["ownerReferences"][0]["uid"] == second["metadata"]["uid"]


async def test_a_secret_that_somebody_deleted_is_made_again_with_the_same_token(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = JobKeys(bytes(32))
    kube = KubeCluster(api, "test", keys, world.namespace)
    stored = await world.create()
    await kube.prime([world.namespace])
    job = RLJob.model_validate({**stored, "apiVersion": "sluice.dev/v1alpha1"})
    secret = ("Secret", token_secret(job)["metadata"]["name"])
    await kube.apply(job, [token_secret(job)])
    await kube.observe(job)
    await kube.apply(
        job, [token_secret(job)]
    )  # "already exists" is what a restarted operator meets
    assert secret in (await kube.observe(job)).objects
    before = text(await secret_of(world, stored, "token"), "token")
    await api.delete(path("Secret", world.namespace, secret[1]), {})
    monkeypatch.setattr(owned, "REREAD_SECONDS", 0.0)
    assert secret not in (await kube.observe(job)).objects, "no pod proves that it is there"
    await kube.apply(job, [token_secret(job)])
    assert (
        text(await secret_of(world, stored, "token"), "token")
        == before
        == keys.token(job.metadata.uid)
    )


async def test_running_pods_prove_that_the_secret_is_there_and_one_that_does_not_start_asks_for_it(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned, "REREAD_SECONDS", 0.0)
    monkeypatch.setattr(owned, "REREAD_WAITING_SECONDS", 0.0)
    kube = KubeCluster(api, "test", JobKeys(bytes(32)), world.namespace)
    stored = await world.create()
    await kube.prime([world.namespace])
    job = RLJob.model_validate({**stored, "apiVersion": "sluice.dev/v1alpha1"})
    secret = ("Secret", token_secret(job)["metadata"]["name"])
    kube.pods.put(pod_of(stored, "buffer", "Running"))
    assert secret in (await kube.observe(job)).objects
    kube.pods.put(pod_of(stored, "trainer", "Pending"))
    assert secret not in (await kube.observe(job)).objects


def pod_of(job: Object, role: str, phase: str) -> Object:
    """A pod as a watch tells of it. One that is pending has its node."""
    metadata = job["metadata"]
    owner = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "RLJob",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    labels = {"sluice.dev/job-name": metadata["name"], "sluice.dev/role": role}
    place = {
        "name": f"demo-{role}-0-1-0",
        "namespace": metadata["namespace"],
        "uid": role,
        "resourceVersion": "1",
    }
    pod_metadata = {**place, "labels": labels, "ownerReferences": [owner]}
    return {
        "kind": "Pod",
        "metadata": pod_metadata,
        "spec": {"nodeName": "here"},
        "status": {"phase": phase},
    }
