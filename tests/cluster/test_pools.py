"""RLEnginePools at a real API server, with a real operator and the StatefulSet's controller."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sluice import Client, ClientError
from sluice.api import API_VERSION, RLEnginePool
from sluice.api.pool import KIND
from sluice.engines.plugin_common.pool_credential import created_of, job_of, verified_tag, weight_of
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.cluster import job_key
from sluice_operator.cluster.kube.engine_pools import KubePools
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.cluster.kube.store import Store, lean_job
from sluice_operator.plan import Deletion
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.clock import parse
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS
from tests.cluster.conftest import CRDS, StartOperator, StartUnder
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import Operator
from tests.cluster.releases import Release
from tests.cluster.test_scaling import kubectl
from tests.cluster.world import Object, World

SPEC: Object = {"model": {"path": "/models/tiny"}, "gpusPerReplica": 0, "replicas": 2}
# A job that can use the pool.
POOLED: Object = {
    "rollout": {"pool": "shared"},
    "trainer": {"lora": {"rank": 8}},
    "weightSync": {"lora": "adapter", "pauseMode": "versions"},
}
OWNED = ("Secret", "Service", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget")


class Pools:
    """The pool `shared` of a namespace, and what a user does with it."""

    def __init__(self, world: World) -> None:
        self.world, self.api, self.namespace = world, world.api, world.namespace

    async def create(self, **spec: Any) -> Object:
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": "shared"},
            "spec": SPEC | spec,
        }
        return await self.api.create(collection(KIND, self.namespace), body)

    async def change(self, **spec: Any) -> Object:
        return await self.api.merge(path(KIND, self.namespace, "shared"), {"spec": spec})

    async def delete(self, policy: str = "Background") -> None:
        await self.api.delete(path(KIND, self.namespace, "shared"), {"propagationPolicy": policy})

    async def status(self) -> Object:
        return (await self.api.get(path(KIND, self.namespace, "shared"))).get("status") or {}

    async def ready(self) -> Object:
        """The condition Ready."""
        conditions = (await self.status()).get("conditions") or [{}]
        return dict(conditions[0])

    async def until_pods(self, count: int) -> None:
        await self.world.until_pods(count, "engine")

    async def run(self) -> None:
        """Start the engines and make them ready, as their kubelets do."""
        await self.world.run()

    async def until_status(self, **expected: Any) -> None:
        async def holds() -> bool:
            status = await self.status()
            return {name: status.get(name) for name in expected} == expected

        await self.world.until(holds)

    async def until_ready_is(self, status: str, text: str) -> None:
        async def holds() -> bool:
            condition = await self.ready()
            return condition.get("status") == status and text in condition["message"]

        await self.world.until(holds)

    async def owned(self) -> list[str]:
        return [
            f"{kind} {stored['metadata']['name']}"
            for kind in await self.served()
            for stored in await self.world.objects(kind)
        ]

    async def served(self) -> list[str]:
        """The kinds of objects of a pool that this API server has."""
        kinds = []
        for kind in OWNED:
            try:
                await self.api.get(collection(kind, self.namespace))
            except errors.MissingApiError:
                continue
            kinds.append(kind)
        return kinds

    async def events(self) -> list[Object]:
        events = (await self.api.get(collection("Event", self.namespace)))["items"]
        return [event for event in events if event["regarding"]["kind"] == KIND]

    async def until_told(self, reason: str) -> Object:
        async def is_told() -> bool:
            return reason in {event["reason"] for event in await self.events()}

        await self.world.until(is_told)
        return next(event for event in await self.events() if event["reason"] == reason)


@pytest.fixture
def pools(world: World, garbage_collector: None) -> Pools:
    """With kube-controller-manager, which makes the pods of a StatefulSet."""
    return Pools(world)


async def test_a_pool_starts_its_engines_and_says_when_they_answer(
    operator: Operator, pools: Pools
) -> None:
    await pools.create()
    await pools.until_pods(2)
    assert await pools.world.names("engine") == ["shared-engine-0", "shared-engine-1"]
    await pools.until_ready_is("False", "0 of 2 engines answer")
    with await asyncio.to_thread(Client, pools.namespace) as client:
        with pytest.raises(ClientError, match="no pool other: expected one of shared"):
            await asyncio.to_thread(client.get_pool, "other")
        (summary,) = await asyncio.to_thread(client.list_pools)
        assert (summary.engines, summary.ready, summary.jobs) == ("0/2", False, 0)
        assert summary.created is not None
        pool = await asyncio.to_thread(client.get_pool, "shared")
        waiting = asyncio.create_task(asyncio.to_thread(pool.wait, 60.0))
        await pools.run()
        assert (await waiting).engines == "2/2"
    await pools.until_ready_is("True", "2 of 2 engines answer")
    await pools.until_status(engines="2/2", replicas=2, readyReplicas=2, jobs=0)
    await pools.until_told("EnginesReady")
    expected = [f"{kind} shared-" for kind in await pools.served()]
    found = await pools.owned()
    assert [any(name.startswith(start) for name in found) for start in expected] == [True] * len(
        expected
    )


async def from_secret(pools: Pools, pod: Object, variable: str) -> str:
    """Return the value of a variable of the pod's container, which is from a Secret."""
    env = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
    source = env[variable]["valueFrom"]["secretKeyRef"]
    secret = await pools.api.get(path("Secret", pools.namespace, source["name"]))
    return base64.b64decode(secret["data"][source["key"]]).decode()


async def test_the_key_of_the_pool_is_hex_in_its_secret(operator: Operator, pools: Pools) -> None:
    await pools.create()
    await pools.until_pods(2)
    (pod, _) = (await pools.world.pods("engine")).values()
    assert len(bytes.fromhex(await from_secret(pools, pod, "SLUICE_POOL_KEY"))) == 32


async def test_engines_accept_the_credential_of_a_job_and_its_workers_find_them(
    operator: Operator, pools: Pools
) -> None:
    world, rollout = pools.world, POOLED["rollout"] | {"poolWeight": 3}
    await pools.create()
    job = await world.create(**POOLED | {"rollout": rollout})
    await pools.until_pods(2)
    await world.until_pods(2, "rollout")
    await world.until_pods(1, "trainer")
    (engine, _) = (await world.pods("engine")).values()
    key = await from_secret(pools, engine, "SLUICE_POOL_KEY")
    clients = await world.pods("rollout") | await world.pods("trainer")
    for pod in clients.values():
        credential = await from_secret(pools, pod, "SLUICE_POOL_CREDENTIAL")
        tag = verified_tag(key, credential)
        assert (job_of(tag), weight_of(tag)) == (f"{pools.namespace}/demo", 3)
        assert created_of(tag) == parse(job["metadata"]["creationTimestamp"]).timestamp()
    urls = {
        entry["value"]
        for pod in (await world.pods("rollout")).values()
        for entry in pod["spec"]["containers"][0]["env"]
        if entry["name"] == "SLUICE_ENGINE_URL"
    }
    host = f"shared-engines.{pools.namespace}.svc:30000"
    assert urls == {f"http://shared-engine-{number}.{host}" for number in (0, 1)}


async def test_kubectl_scales_a_pool(plane: ControlPlane, operator: Operator, pools: Pools) -> None:
    await pools.create()
    await pools.until_pods(2)
    await pools.run()
    await pools.until_status(engines="2/2")
    await asyncio.to_thread(
        kubectl, plane, pools.world, "scale", "rlenginepool/shared", "--replicas=3"
    )
    await pools.until_pods(3)
    await pools.run()
    await pools.until_status(engines="3/3", replicas=3)
    scale = await pools.api.get(path(KIND, pools.namespace, "shared", "scale"))
    assert scale["status"]["replicas"] == 3
    selector = scale["status"]["selector"]
    listed = await asyncio.to_thread(
        kubectl, plane, pools.world, "get", "pods", "--selector", selector, "--output=name"
    )
    assert len(listed.split()) == 3
    table = await asyncio.to_thread(kubectl, plane, pools.world, "get", "rlp")
    head, row = table.splitlines()
    assert head.split() == ["NAME", "MODEL", "ENGINES", "JOBS", "TOKENS/S", "AGE"]
    assert row.split()[:4] == ["shared", "/models/tiny", "3/3", "0"]
    await asyncio.to_thread(
        kubectl, plane, pools.world, "scale", "rlenginepool/shared", "--replicas=1"
    )
    await pools.until_pods(1)
    await pools.until_status(engines="1/1")


async def test_a_change_of_the_spec_replaces_engines(operator: Operator, pools: Pools) -> None:
    await pools.create(replicas=1)
    await pools.until_pods(1)
    await pools.run()
    await pools.until_status(engines="1/1")
    await pools.change(maxRank=64)

    async def is_replaced() -> bool:
        pods = (await pools.world.pods("engine")).values()
        commands = [pod["spec"]["containers"][0]["args"] for pod in pods]
        return [args[args.index("--max-lora-rank") + 1] for args in commands] == ["64"]

    await pools.world.until(is_replaced)
    await pools.until_told("EnginesReplaced")


async def test_a_stateful_set_that_was_scaled_by_hand_is_scaled_back(
    operator: Operator, pools: Pools
) -> None:
    await pools.create()
    await pools.until_pods(2)
    at = path("StatefulSet", pools.namespace, "shared-engine")
    await pools.api.merge(at, {"spec": {"replicas": 0}})
    await pools.until_pods(0)
    # Its objects are read again 30 s later, because an engine is missing.
    await pools.until_pods(2)


async def test_an_object_of_another_owner_is_left_alone(operator: Operator, pools: Pools) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "shared-engines"},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "mine"}},
    }
    await pools.api.create(collection("Service", pools.namespace), service)
    await pools.create()
    event = await pools.until_told("ApplyFailed")
    assert "Service shared-engines is needed by RLEnginePool" in event["note"]
    assert "delete or rename it, or the pool" in event["note"]
    stored = await pools.api.get(path("Service", pools.namespace, "shared-engines"))
    assert stored["spec"]["selector"] == {"app": "mine"}
    assert await pools.world.names("engine") == []
    await pools.api.delete(path("Service", pools.namespace, "shared-engines"), {})
    await pools.until_pods(2)


async def test_an_engine_that_fails_is_named_with_its_last_words(
    operator: Operator, pools: Pools
) -> None:
    await pools.create(replicas=1)
    await pools.until_pods(1)
    (pod,) = (await pools.world.pods("engine")).values()
    ended = {"exitCode": 1, "reason": "Error", "message": "error: no such model: /models/tiny"}
    status = {
        "name": "engine",
        "image": "i",
        "imageID": "",
        "restartCount": 3,
        "ready": False,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended | {"finishedAt": "2026-01-31T12:00:00Z"}},
    }
    await pools.world.set_status(pod, phase="Running", containerStatuses=[status])
    await pools.until_ready_is("False", "shared-engine-0: engine: no such model: /models/tiny")
    assert (await pools.until_told("EnginesNotReady"))["type"] == "Warning"


@asynccontextmanager
async def engine_metrics(address: str) -> AsyncIterator[None]:
    """Serve /metrics of an engine that generates about 1,000 tokens per second."""
    start = time.monotonic()

    async def metrics(_: web.Request) -> web.Response:
        tokens = 1000 * (time.monotonic() - start)
        text = "# TYPE sglang:generation_tokens_total counter\n"
        return web.Response(text=f'{text}sglang:generation_tokens_total{{m="x"}} {tokens}\n')

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, address, names.PORTS["http"]).start()
    yield
    await runner.cleanup()


async def test_the_operator_asks_engines_for_their_tokens(
    start: StartOperator, pools: Pools
) -> None:
    # An address that no engine of another test listens on.
    address = "127.0.0.77"
    async with engine_metrics(address):
        await start(SLUICE_PROBE_SECONDS="1")
        await pools.create(replicas=1)
        await pools.until_pods(1)
        await pools.run()
        (pod,) = (await pools.world.pods("engine")).values()
        await pools.world.set_status(pod, podIP=address, podIPs=[{"ip": address}])

        async def counts() -> bool:
            rate = (await pools.status()).get("tokensPerSecond", "")
            return rate != "" and 900 < float(rate) < 1100

        await pools.world.until(counts)


async def test_the_operator_waits_for_the_crd_of_pools(
    plane: ControlPlane, world: World, tmp_path: Path
) -> None:
    """Served no more, but kept: other tests need it."""
    crd = f"{CRDS}/rlenginepools.sluice.dev"
    versions = (await world.api.get(crd))["spec"]["versions"]
    other = {**versions[0], "name": "v9", "storage": False}
    await world.api.merge(crd, {"spec": {"versions": [{**versions[0], "served": False}, other]}})
    log = tmp_path / "operator.log"
    operator = Operator(plane.kubeconfig, world.namespace, log)
    try:

        async def waits() -> bool:
            return "waiting for the lists of jobs, pools and pods" in log.read_text()

        await world.until(waits)
        assert operator.get("/readyz")[0] == 503
        await world.api.merge(crd, {"spec": {"versions": versions}})
        await operator.ready()
    finally:
        operator.kill()
        await world.api.merge(crd, {"spec": {"versions": versions}})


async def test_jobs_are_counted_and_told_of_changes(operator: Operator, pools: Pools) -> None:
    world = pools.world
    await world.create("early", **POOLED)

    async def waits() -> bool:
        message = (await world.condition("Running", "early")).get("message", "")
        return "there is no RLEnginePool shared" in message

    await world.until(waits)
    await pools.create()
    await pools.until_status(jobs=1)
    await world.until_pods(2, "rollout")
    await pools.change(replicas=3)
    await world.until_pods(3, "rollout")
    await world.create("late", **POOLED, suspend=True)
    await pools.until_status(jobs=2)
    await world.delete("late")
    await pools.until_status(jobs=1)
    await world.run()
    await pools.until_status(engines="3/3")
    await world.finish("early-trainer-0-1-0", 0)
    await pools.until_status(jobs=0)
    assert (await world.status("early"))["state"] == "Succeeded"


async def test_a_pool_takes_all_its_objects_along_and_its_jobs_wait(
    operator: Operator, pools: Pools
) -> None:
    world = pools.world
    await pools.create()
    await world.create(**POOLED)
    await world.until_pods(2, "rollout")
    await pools.until_status(jobs=1)
    await pools.delete()
    event = await pools.until_told("DeletedInUse")
    assert event["note"] == "the pool is deleted while jobs use it, which then wait: demo"
    await pools.until_pods(0)

    async def is_gone() -> bool:
        return not [name for name in await pools.owned() if " shared-" in name]

    await world.until(is_gone)

    async def says_so() -> bool:
        return "there is no RLEnginePool shared" in (await world.condition("Running"))["message"]

    await world.until(says_so)


async def test_a_pool_that_waits_for_its_objects_says_that_it_is_used(
    operator: Operator, pools: Pools
) -> None:
    await pools.create()
    await pools.until_pods(2)
    await pools.run()
    await pools.world.bind("shared-engine-0")
    await pools.world.create(**POOLED)
    await pools.until_status(jobs=1)
    await pools.delete("Foreground")
    await pools.until_ready_is("False", "being deleted; unfinished jobs use it: demo")
    await pools.world.gone("shared-engine-0")


async def test_a_pod_on_a_dead_node_is_deleted_by_force_and_replaced(
    operator: Operator, pools: Pools
) -> None:
    """It was deleted, as Kubernetes does with pods of a node that does not answer."""
    await pools.create(replicas=1)
    await pools.until_pods(1)
    await pools.world.bind("shared-engine-0")
    before = (await pools.world.pods("engine"))["shared-engine-0"]["metadata"]["uid"]
    cluster = KubePools(
        pools.api, "test", JobKeys(bytes(32)), "default", NO_DEFAULTS, Store(job_key, lean_job)
    )
    stored = await pools.api.get(path(KIND, pools.namespace, "shared"))
    for pod in (await pools.world.pods("engine")).values():
        cluster.pods.put(pod)
    await pools.api.delete(
        path("Pod", pools.namespace, "shared-engine-0"), {"gracePeriodSeconds": 600}
    )
    await cluster.delete(
        RLEnginePool.model_validate(stored), [Deletion("Pod", "shared-engine-0", 0)]
    )

    async def is_replaced() -> bool:
        pods = await pools.world.pods("engine")
        return bool(pods) and pods["shared-engine-0"]["metadata"]["uid"] != before

    await pools.world.until(is_replaced)


@pytest.mark.parametrize("mode", ["cluster", "namespaces"])
async def test_the_rights_of_the_chart_are_enough(
    release: Release, start_under: StartUnder, pools: Pools, mode: str
) -> None:
    watched = [] if mode == "cluster" else ["--set", f"watchNamespaces={{{pools.namespace}}}"]
    release.install("--set", "crds.install=false,replicas=0", *watched)
    operator = await start_under(release)
    await pools.create()
    await pools.until_pods(2)
    await pools.run()
    await pools.until_status(engines="2/2")
    await pools.change(replicas=1, networkPolicy={"enabled": False})
    await pools.until_status(engines="1/1")
    await pools.until_told("Scaled")

    async def has_no_policy() -> bool:
        return "NetworkPolicy shared-engines" not in await pools.owned()

    await pools.world.until(has_no_policy)
    await pools.delete()
    await pools.until_pods(0)
    refusals = [
        line
        for line in operator.log.read_text().splitlines()
        if "forbidden" in line.lower() and pools.namespace in line
    ]
    assert refusals == []


# -- the API server's checks


@pytest.fixture
async def stored(rules: Api) -> AsyncIterator[str]:
    """The path of a pool at an API server that enforces rules, without an operator."""
    metadata = {"name": "ruled", "namespace": "default"}
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": SPEC}
    await rules.create(collection(KIND, "default"), body)
    yield path(KIND, "default", "ruled")
    await rules.delete(path(KIND, "default", "ruled"), {})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        pytest.param(
            {"engineArgs": {"enable-lora": True}},
            "LoRA adapters are not supported, because those of a pool come from its jobs: leave "
            "them out and set maxAdapters, maxRank and targetModules",
            id="adapters",
        ),
        pytest.param(
            {"engineArgs": {"speculativeAlgorithm": "EAGLE"}},
            "speculative decoding is not supported",
            id="speculation",
        ),
        pytest.param({"maxAdapters": 0}, "spec.maxAdapters", id="range"),
        pytest.param({"engine": "vllm"}, "spec.engine", id="engine"),
        pytest.param({"modle": {}}, "modle", id="unknown"),
    ],
)
async def test_an_invalid_pool_is_refused(rules: Api, spec: Object, sentence: str) -> None:
    metadata = {"name": "bad", "namespace": "default"}
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": SPEC | spec}
    with pytest.raises(errors.InvalidError) as raised:
        await rules.create(collection(KIND, "default"), body)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        pytest.param(
            {"model": {"path": "/models/other"}},
            "spec.model: Forbidden: cannot be changed, because jobs train adapters of this model: "
            "make another pool",
            id="model",
        ),
        pytest.param(
            {"gpusPerReplica": 1},
            "spec.gpusPerReplica: Forbidden: cannot be changed, because every engine would restart",
            id="gpus",
        ),
    ],
)
async def test_what_a_pool_cannot_change_is_refused(
    rules: Api, stored: str, spec: Object, sentence: str
) -> None:
    with pytest.raises(errors.InvalidError) as raised:
        await rules.merge(stored, {"spec": spec})
    assert sentence in str(raised.value)


async def test_all_else_may_change(rules: Api, stored: str) -> None:
    change = {"replicas": 4, "maxRank": 8, "maxAdapters": 2, "targetModules": ["q_proj"]}
    assert (await rules.merge(stored, {"spec": change}))["spec"]["replicas"] == 4


async def test_a_pool_is_stored_with_its_defaults(rules: Api, stored: str) -> None:
    spec = (await rules.get(stored))["spec"]
    assert (spec["engine"], spec["maxAdapters"], spec["maxRank"]) == ("sglang", 16, 32)
    assert spec["targetModules"] == ["all-linear"]
