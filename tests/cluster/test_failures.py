"""Failures of a job's pods, of its spec, and of the objects around it.

Specs that break a rule are stored without the rules of the CRD (`unruled`): most API servers refuse
them, those that took them before there were rules have them still.
"""

from __future__ import annotations

import asyncio

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.paths import collection, path
from tests.cluster.conftest import CRDS, StartOperator
from tests.cluster.operators import Operator
from tests.cluster.queues import WEBHOOKS
from tests.cluster.world import SPEC, Object, World, now

TRAINERS = ["demo-trainer-0-1-0", "demo-trainer-0-1-1"]


async def test_a_trainer_gang_restarts_only_when_all_its_old_pods_are_gone(
    operator: Operator, world: World
) -> None:
    await world.running(6, trainer={"nodes": 2})
    await world.bind(*TRAINERS)
    await world.finish(TRAINERS[1], 1, message="step 3\nerror: NCCL timed out")

    async def attempt_is_kept() -> bool:
        return (await world.gang("trainer")).get("attempt") == 2

    await world.until(attempt_is_kept)
    await world.gone(TRAINERS[1])
    await asyncio.sleep(2)
    assert await world.names("trainer") == TRAINERS[:1], "attempt 1 is still alive"
    await world.gone(TRAINERS[0])
    await world.until_pods(2, "trainer")
    assert await world.names("trainer") == ["demo-trainer-0-2-0", "demo-trainer-0-2-1"]
    assert await world.names("rollout") == ["demo-rollout-0-1-0", "demo-rollout-1-1-0"], (
        "rollouts survive"
    )
    status = await world.status()
    failure = status["lastFailure"]
    assert (failure["pod"], failure["exitCode"], status["restarts"]) == (TRAINERS[1], 1, 1)
    assert failure["message"].endswith("error: NCCL timed out")
    assert status["state"] == "Restarting"
    assert "GangRestarting" in await world.reasons()


async def test_a_rollout_restarts_alone_with_growing_back_off(
    operator: Operator, world: World
) -> None:
    backoff = {"rolloutBackoffSeconds": 2}
    await world.running(5, failurePolicy=backoff)
    waits = []
    for attempt in (1, 2):
        await world.finish(
            f"demo-rollout-0-{attempt}-0", 1, "error: out of memory", container="engine"
        )
        start = asyncio.get_running_loop().time()

        async def has_next(name: str = f"demo-rollout-0-{attempt + 1}-0") -> bool:
            return name in await world.names("rollout")

        await world.until(has_next)
        waits.append(asyncio.get_running_loop().time() - start)
        await world.run()
    assert 1.5 < waits[0] < 4.5
    assert 3.5 < waits[1] < 7
    assert "demo-rollout-1-1-0" in await world.names()
    assert "demo-trainer-0-1-0" in await world.names()


async def test_used_up_restarts_fail_the_job(operator: Operator, world: World) -> None:
    await world.running(5, failurePolicy={"maxRestarts": 0})
    await world.finish("demo-trainer-0-1-0", 1, message="error: loss is not finite")
    await world.until_state("Failed")
    condition = await world.condition("Failed")
    assert condition["reason"] == "ReachedMaxRestarts"
    assert "loss is not finite" in condition["message"]
    await world.until_pods(1)
    assert await world.names() == ["demo-trainer-0-1-0"]


async def test_a_pod_that_somebody_deletes_comes_back_and_counts_nothing(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await world.gone("demo-trainer-0-1-0")

    async def is_replaced() -> bool:
        return await world.names("trainer") == ["demo-trainer-0-2-0"]

    await world.until(is_replaced)
    assert (await world.status())["restarts"] == 0


@pytest.mark.usefixtures("unruled")
async def test_an_invalid_spec_fails_with_the_fields_path_and_may_be_mended(
    operator: Operator, world: World
) -> None:
    await world.create(trainer={"stepsPerBatch": 7})
    await world.until_state("Failed")
    condition = await world.condition("Failed")
    assert condition["reason"] == "InvalidSpec"
    assert "spec.trainer.stepsPerBatch: batchSize x samplesPerPrompt" in condition["message"]
    assert "InvalidSpec" in await world.reasons()
    assert await world.names() == []
    await world.change({"trainer": {"stepsPerBatch": 1}})
    await world.until_pods(5)
    assert (await world.condition("Failed")) == {}


@pytest.mark.usefixtures("unruled")
async def test_what_must_not_change_is_refused_and_the_job_goes_on(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await world.change({"trainer": {"steps": 99}, "rollout": {"replicas": 3}})
    await world.until_pods(3, "rollout")

    async def is_told() -> bool:
        return "spec change refused" in (await world.condition("Running")).get("message", "")

    await world.until(is_told)
    message = (await world.condition("Running"))["message"]
    assert "cannot be changed: spec.trainer.steps: 10 -> 99" in message
    assert "SpecChangeRefused" in await world.reasons()
    config = (await world.objects("ConfigMap"))[0]["data"]["rljob.json"]
    assert '"steps": 10' in config
    await world.change({"trainer": {"steps": 10}})

    async def is_well() -> bool:
        return "refused" not in (await world.condition("Running"))["message"]

    await world.until(is_well)


@pytest.mark.usefixtures("unruled")
async def test_rows_of_own_code_and_a_volume_of_data_go_together(
    operator: Operator, world: World
) -> None:
    volume = {"persistentVolumeClaim": {"claimName": "data"}}
    rows = {"source": {"function": "/sluice/data/rows.py:make"}}
    await world.running(5, data={"prompts": [rows, {"path": "train.jsonl"}], "volume": volume})
    await world.change({"trainer": {"steps": 99}})

    async def is_told() -> bool:
        return "spec.trainer.steps: 10 -> 99" in (await world.condition("Running")).get(
            "message", ""
        )

    await world.until(is_told)
    assert "prompts" not in (await world.condition("Running"))["message"]


@pytest.mark.usefixtures("unruled")
async def test_a_running_job_keeps_the_uris_that_it_began_with(
    operator: Operator, world: World
) -> None:
    await world.running(
        5, model={"path": "hf://org/name"}, downloads={"secretRef": {"name": "bucket"}}
    )
    fetching = [
        pod
        for pod in await world.objects("Pod")
        if "fetch" in [init["name"] for init in pod["spec"].get("initContainers", [])]
    ]
    assert {pod["metadata"]["labels"]["sluice.dev/role"] for pod in fetching} == {
        "trainer",
        "rollout",
    }
    await world.change({"trainer": {"steps": 99}})

    async def is_told() -> bool:
        return "spec.trainer.steps: 10 -> 99" in (await world.condition("Running")).get(
            "message", ""
        )

    await world.until(is_told)
    assert "hf://" not in (await world.condition("Running"))["message"]


@pytest.mark.usefixtures("unruled")
async def test_a_spec_that_becomes_invalid_does_not_end_a_running_job(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await world.change({"trainer": {"stepsPerBatch": 7}})

    async def is_told() -> bool:
        return "stepsPerBatch" in (await world.condition("Running")).get("message", "")

    await world.until(is_told)
    assert (await world.status())["state"] == "Starting"
    assert len(await world.names()) == 5


async def test_an_object_with_fields_of_another_version_is_no_reason_to_fail(
    start: StartOperator, world: World
) -> None:
    """A job was stored under a newer CRD.

    The operator sees the unknown fields and drops them, as an API server would.
    """
    crd = f"{CRDS}/rljobs.sluice.dev"
    schema = (await world.api.get(crd))["spec"]["versions"]
    loose: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    open_schema = {
        "openAPIV3Schema": {"type": "object", "properties": {"spec": loose, "status": loose}}
    }
    lenient = [{**schema[0], "schema": open_schema}]
    await world.api.merge(crd, {"spec": {"versions": lenient}})
    try:
        await asyncio.sleep(1)  # the API server takes up a new schema after a moment
        await start()
        await world.create(formerField={"a": 1}, trainer={"oldKnob": True})
        assert (await world.job())["spec"]["formerField"] == {"a": 1}
        await world.until_pods(5)
        assert "oldKnob" not in (await world.objects("ConfigMap"))[0]["data"]["rljob.json"]
    finally:
        await world.api.merge(crd, {"spec": {"versions": schema}})


async def test_an_error_of_the_operators_own_is_told_and_got_over(
    start: StartOperator, world: World
) -> None:
    """A broken config map has no special message, so it stands for any unexpected error."""
    first = await start()
    await world.running(5)
    before = await world.status()
    assert first.end() == 0
    config = path("ConfigMap", world.namespace, "demo-config")
    await world.api.merge(config, {"data": {"rljob.json": "{"}})
    await start()

    async def is_told() -> bool:
        return (await world.condition("Running")).get("reason") == "ReconcileFailed"

    await world.until(is_told)
    message = (await world.condition("Running"))["message"]
    assert "JSONDecodeError: Expecting property name" in message
    assert "(spec_acceptance.py:" in message

    async def has_an_event() -> bool:
        return "ReconcileFailed" in await world.reasons()

    await world.until(has_an_event)
    assert (await world.status())["roles"] == before["roles"]
    assert len(await world.names()) == 5
    await world.api.delete(config, {})

    async def is_well() -> bool:
        running = await world.condition("Running")
        return (
            running["reason"] != "ReconcileFailed" and "JSONDecodeError" not in running["message"]
        )

    await world.until(is_well)
    assert {
        gang["attempt"] for role in (await world.status())["roles"] for gang in role["gangs"]
    } == {1}


async def test_so_it_is_of_a_job_that_has_no_status_yet(start: StartOperator, world: World) -> None:
    job = await world.create()
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": "RLJob",
        "name": "demo",
        "uid": job["metadata"]["uid"],
    }
    metadata = {"name": "demo-config", "ownerReferences": [owner | {"controller": True}]}
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"rljob.json": "{}"},
    }
    await world.api.create(collection("ConfigMap", world.namespace), body)
    await start()

    async def is_told() -> bool:
        return (await world.condition("Running")).get("reason") == "ReconcileFailed"

    await world.until(is_told)
    condition = await world.condition("Running")
    assert (condition["status"], (await world.status())["state"]) == ("Unknown", "Pending")
    assert "no pod has been created; " in condition["message"]
    assert "KeyError: 'spec' (spec_acceptance.py:" in condition["message"]
    await world.api.delete(path("ConfigMap", world.namespace, "demo-config"), {})
    await world.until_pods(5)


async def test_an_object_of_somebody_else_is_not_touched(operator: Operator, world: World) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "demo-config"},
        "data": {"mine": "1"},
    }
    mine = path("ConfigMap", world.namespace, "demo-config")
    await world.api.create(collection("ConfigMap", world.namespace), body)
    await world.create()

    async def is_told() -> bool:
        return "ApplyFailed" in await world.reasons()

    await world.until(is_told)
    assert (await world.api.get(mine))["data"] == {"mine": "1"}
    assert await world.names() == []
    await world.api.delete(mine, {})
    await world.until_pods(5)


async def test_pods_that_a_quota_refuses_show_in_the_status(
    operator: Operator, world: World
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": {"pods": "2"}},
    }
    quotas = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    await world.api.create(quotas, quota)

    async def is_known() -> bool:
        return "hard" in (await world.api.get(f"{quotas}/q")).get("status", {})

    await world.until(is_known)
    await world.create()

    async def is_told() -> bool:
        return "exceeded quota" in (await world.condition("Running")).get("message", "")

    await world.until(is_told)
    await world.api.delete(f"{quotas}/q", {})
    await world.until_pods(5)

    async def is_well() -> bool:
        return "quota" not in (await world.condition("Running"))["message"]

    await world.until(is_well)


async def test_a_webhook_that_is_down_shows_in_the_status_and_as_an_event(
    operator: Operator, world: World
) -> None:
    """The API server answers each new pod with a 500, as while Kueue is being upgraded."""
    name = f"down-{world.namespace}"
    await world.api.merge(
        f"/api/v1/namespaces/{world.namespace}", {"metadata": {"labels": {"webhook": name}}}
    )
    webhook = {
        "name": "mpod.kb.io",
        "clientConfig": {"url": "https://127.0.0.1:9/mutate--v1-pod"},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["*"]}
        ],
        "namespaceSelector": {"matchLabels": {"webhook": name}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [webhook],
    }
    await world.api.create(WEBHOOKS, body)
    try:
        await world.until(lambda: creates_no_pod(world))
        await world.create()
        words = "the cluster's webhook mpod.kb.io does not answer: ask its administrator"
        await world.until(lambda: says(world, words))
        assert "ApplyFailed" in await world.reasons()
    finally:
        await world.api.delete(f"{WEBHOOKS}/{name}", {})
    await world.until_pods(5)


async def creates_no_pod(world: World) -> bool:
    """The API server asks the webhook, which it does a moment after it was configured."""
    container = {"name": "c", "image": "none"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe"},
        "spec": {"containers": [container]},
    }
    try:
        await world.api.create(collection("Pod", world.namespace), pod)
    except errors.ServerFailedError:
        return True
    await world.gone("probe")
    return False


async def says(world: World, words: str) -> bool:
    return words in (await world.condition("Running")).get("message", "")


async def test_a_job_that_does_not_start_fails_at_its_deadline(
    operator: Operator, world: World
) -> None:
    await world.create(startupDeadlineSeconds=2)
    await world.until_state("Failed")
    assert (await world.condition("Failed"))["reason"] == "StartupDeadlineExceeded"
    assert SPEC["trainer"]["steps"] == 10


async def test_a_volume_that_does_not_come_shows_in_the_status(
    operator: Operator, world: World
) -> None:
    """A kubelet reports this only in events.

    The pods of the job have a node, on which no kubelet runs.
    """
    await world.create()
    await world.until_pods(5)
    pod = next(item for name, item in (await world.pods("trainer")).items())
    name = pod["metadata"]["name"]
    await world.bind(name)
    regarding = {
        "kind": "Pod",
        "namespace": world.namespace,
        "name": name,
        "uid": pod["metadata"]["uid"],
    }
    body = {
        "metadata": {"name": f"{name}.1"},
        "involvedObject": regarding,
        "type": "Warning",
        "reason": "FailedMount",
        "message": 'MountVolume.SetUp failed for volume "t" : secret "hf" not found',
        "count": 4,
        "firstTimestamp": now(),
        "lastTimestamp": now(),
        "source": {"component": "kubelet"},
    }
    await world.api.create(f"/api/v1/namespaces/{world.namespace}/events", body)

    async def is_told() -> bool:
        return (await world.status()).get("lastFailure", {}).get("reason") == "FailedMount"

    await world.until(is_told, 90)
    assert (await world.status())["lastFailure"]["pod"] == name
    message = (await world.condition("Running"))["message"]
    assert f"{name}: FailedMount: " in message
    assert "create the secret hf in the job's namespace" in message
