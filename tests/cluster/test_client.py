"""The Python client on a real API server, together with the operator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice import Client, ClientError, JobFailedError
from sluice_operator.cluster.kube.paths import collection, path
from tests.cluster.operators import Operator
from tests.cluster.world import SPEC, World

JOB = {"apiVersion": "sluice.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "demo"}}
ROWS = [{"prompt": "max 1 2 3 =", "label": "3"}]


def length(sample: Any) -> float:
    return float(len(sample.response))


length.__module__ = "__main__"  # as of a notebook


@pytest.fixture
async def client(world: World) -> Any:
    client = await asyncio.to_thread(Client, world.namespace)
    yield client
    await asyncio.to_thread(client.close)


async def test_functions_and_rows_come_as_a_config_map_that_goes_with_the_job(
    operator: Operator, world: World, client: Client
) -> None:
    spec = {**SPEC, "reward": None}
    job = await asyncio.to_thread(
        client.submit, {**JOB, "spec": spec}, name="packed", reward=length, prompts=ROWS
    )
    code = await world.api.get(path("ConfigMap", world.namespace, "packed-code"))
    assert (
        code["metadata"]["ownerReferences"][0]["uid"]
        == (await world.job("packed"))["metadata"]["uid"]
    )
    assert "def length(" in code["data"]["reward.py"]
    assert code["data"]["prompts.jsonl"].startswith('{"prompt": "max 1 2 3 ="')

    async def has_pods() -> bool:
        return {"rollout", "buffer"} <= {
            pod["metadata"]["labels"]["sluice.dev/role"] for pod in (await world.pods()).values()
        }

    await world.until(has_pods)
    for role, container in (("rollout", "worker"), ("buffer", "buffer")):
        [pod, *_] = (await world.pods(role)).values()
        [ours] = [item for item in pod["spec"]["containers"] if item["name"] == container]
        mounts = {
            volume_mount["name"]: volume_mount["mountPath"] for volume_mount in ours["volumeMounts"]
        }
        assert mounts["code"] == "/sluice/code"
    stored = (await world.job("packed"))["spec"]
    assert stored["reward"]["function"] == "/sluice/code/reward.py:length"
    await asyncio.to_thread(job.delete)


async def test_without_its_files_there_is_no_job(
    operator: Operator, world: World, client: Client
) -> None:
    taken = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "packed-code"}}
    await world.api.create(collection("ConfigMap", world.namespace), taken)
    with pytest.raises(ClientError, match=r"cannot create ConfigMap packed-code: .*already exists"):
        await asyncio.to_thread(client.submit, {**JOB, "spec": SPEC}, name="packed", prompts=ROWS)
    assert await asyncio.to_thread(client.list) == []


async def test_a_job_is_listed_scaled_suspended_and_deleted(
    operator: Operator, world: World, client: Client
) -> None:
    job = await asyncio.to_thread(client.submit, {**JOB, "spec": SPEC})
    assert [item.name for item in await asyncio.to_thread(client.list)] == ["demo"]
    await asyncio.to_thread(job.scale, 3)
    assert (await world.job())["spec"]["rollout"]["replicas"] == 3
    await asyncio.to_thread(job.suspend)

    async def is_suspended() -> bool:
        return (await asyncio.to_thread(lambda: job.status.state)) == "Suspended"

    await world.until(is_suspended)
    await asyncio.to_thread(job.resume)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(job.wait, 1.0, progress=False)
    with pytest.raises(ClientError, match="is in the run directory on demo-checkpoint-"):
        await asyncio.to_thread(job.samples)
    await asyncio.to_thread(job.delete)
    with pytest.raises(ClientError, match="there is no RLJob demo"):
        await asyncio.to_thread(client.get, "demo")


async def test_what_the_api_server_refuses_is_one_error(
    operator: Operator, world: World, client: Client
) -> None:
    await asyncio.to_thread(client.submit, {**JOB, "spec": SPEC})
    with pytest.raises(ClientError, match=r'cannot create RLJob demo: .*"demo" already exists'):
        await asyncio.to_thread(client.submit, {**JOB, "spec": SPEC})


async def test_a_job_that_failed_says_why(operator: Operator, world: World, client: Client) -> None:
    await world.running(5, failurePolicy={"maxRestarts": 0})
    await world.finish("demo-trainer-0-1-0", 1, "step 3\nerror: loss is not finite")
    job = await asyncio.to_thread(client.get, "demo")
    with pytest.raises(JobFailedError, match="ReachedMaxRestarts"):
        await asyncio.to_thread(job.wait, 60.0, progress=False)
