"""Jobs whose engines are those of an RLEnginePool."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api.pool import RLEnginePoolSpec
from sluice.engines.plugin_common.pool_credential import credential
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.plan import KubeObject
from sluice_operator.plan.decide.pools import in_cluster
from sluice_operator.plan.facts.constants import POOL_LOOK_SECONDS
from sluice_operator.plan.facts.model import Gang, Images, PodGroup, PoolFacts, Progress
from sluice_operator.plan.manifests.network import pool_policy
from sluice_operator.plan.manifests.objects import supporting_objects
from sluice_operator.plan.manifests.pods import gang_pods
from sluice_operator.plan.report.pool_fit import misfit
from tests.unit.operator.world import World, make_job

CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}
ABSENT = PoolFacts("shared", problem="rollout.pool: there is no RLEnginePool shared")


def pooled(**spec: Any) -> Any:
    """Return a job with the pool `shared`. Groups of the spec are merged over it."""
    groups: dict[str, Any] = {
        "trainer": {"steps": 10, "gpusPerNode": 0, "lora": {"rank": 8}},
        "rollout": {"pool": "shared"},
        "weightSync": {"lora": "adapter", "pauseMode": "versions"},
    }
    for name, fields in spec.items():
        groups[name] = groups.get(name, {}) | fields if isinstance(fields, dict) else fields
    return make_job(**groups)


def world(engines: int = 2, **spec: Any) -> World:
    """Return a world with a pool of this many engines."""
    result = World(pooled(**spec))
    result.pool = in_cluster(result.job, engines)
    return result


def pod(role: Any, **spec: Any) -> KubeObject:
    job = pooled(**spec)
    pool = in_cluster(job, 3)
    return gang_pods(job, Gang(role, 2, 1), 1, "r:1", Images(), None, pool)[0]


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


# -- workers


@pytest.mark.parametrize("engines", [1, 3], ids=str)
def test_a_job_has_a_worker_for_each_engine_of_its_pool(engines: int) -> None:
    settled = world(engines, rollout={"replicas": 7, "minReplicas": 5})
    settled.settle()
    assert settled.names("rollout") == [f"demo-rollout-{i}-1-0" for i in range(engines)]
    assert settled.status.rollout_replicas == engines


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)], ids=["more", "fewer"])
def test_workers_come_and_go_with_the_engines(before: int, after: int) -> None:
    running = world(before)
    running.settle()
    running.pool = in_cluster(running.job, after)
    running.settle()
    assert len(running.names("rollout")) == after
    assert "demo-rollout-0-1-0" in running.names(), "the first one goes on"
    assert running.names("trainer") == ["demo-trainer-0-1-0"]


# -- problems


def test_a_job_does_not_start_before_its_pool_can_be_used() -> None:
    waiting = world()
    waiting.pool = ABSENT
    decision = waiting.step()
    assert not decision.create
    running = decision.status.condition("Running")
    assert running is not None
    assert running.status == "False"
    assert running.message.endswith(f"; {ABSENT.problem}; the job starts no workers and no trainer")
    assert decision.requeue_after is not None
    assert decision.requeue_after <= POOL_LOOK_SECONDS
    waiting.step()
    assert [event.reason for event in waiting.events].count("PoolUnusable") == 1

    waiting.pool = in_cluster(waiting.job, 2)
    waiting.settle()
    assert len(waiting.names("rollout")) == 2
    assert waiting.names("trainer")


def test_what_runs_goes_on_while_the_pool_is_gone_and_is_not_replaced() -> None:
    running = world()
    running.settle()
    pods = running.names()
    running.pool = ABSENT
    running.end("demo-rollout-1-1-0", 1, "worker")
    for _ in range(5):
        running.step()
        running.remove_terminating()
        running.advance(100)
    assert running.names() == [name for name in pods if name != "demo-rollout-1-1-0"]

    running.pool = in_cluster(running.job, 2)
    running.settle()
    assert running.names("rollout") == ["demo-rollout-0-1-0", "demo-rollout-1-2-0"]
    assert running.names("trainer") == ["demo-trainer-0-1-0"]


def test_a_suspended_job_needs_no_pool() -> None:
    resting = World(pooled(suspend=True))
    resting.pool = ABSENT
    resting.settle()
    assert not any(event.reason == "PoolUnusable" for event in resting.events)


def test_a_job_says_that_it_waits_for_the_engines_of_its_pool() -> None:
    waiting = world()
    waiting.settle()
    waiting.progress = Progress(step=0)
    running = waiting.step().status.condition("Running")
    assert running is not None
    assert running.message.endswith("no engine of the pool shared answers yet")


# -- manifests


def test_a_worker_alone_uses_the_engine_of_its_number() -> None:
    rendered = pod("rollout", kernelCache={"volume": {"emptyDir": {}}})
    [worker] = rendered["spec"]["containers"]
    assert worker["name"] == "worker"
    assert "initContainers" not in rendered["spec"]
    assert {volume["name"] for volume in rendered["spec"]["volumes"]} == {"config"}
    assert "nvidia.com/gpu" not in str(worker["resources"])
    assert rendered["spec"]["securityContext"]["runAsNonRoot"] is True
    assert env(worker)["SLUICE_ENGINE_URL"] == (
        "http://shared-engine-2.shared-engines.default.svc:30000"
    )


@pytest.mark.parametrize("role", ["trainer", "rollout", "buffer", "rendezvous"])
def test_trainer_and_workers_have_the_credential(role: str) -> None:
    rendered = pod(role)
    [container] = rendered["spec"]["containers"]
    reference = {"secretKeyRef": {"name": "demo-pool-1234", "key": "token"}}
    expected = reference if role in ("trainer", "rollout") else None
    assert env(container).get("SLUICE_POOL_CREDENTIAL") == expected
    assert rendered["metadata"]["labels"]["sluice.dev/pool"] == "shared"


def test_the_jobs_secret_has_a_credential_that_the_pools_key_signs() -> None:
    job, keys = pooled(rollout={"poolWeight": 3}), JobKeys(bytes(range(32)))
    secrets = {
        manifest["metadata"]["name"]: keys.filled(job, manifest)
        for manifest in supporting_objects(job)
        if manifest["kind"] == "Secret"
    }
    assert secrets["demo-pool-1234"]["stringData"] == {
        "token": credential(keys.pool_key("default/shared"), "default/demo", 3, 0)
    }
    assert "demo-pool-1234" not in {
        manifest["metadata"]["name"] for manifest in supporting_objects(make_job())
    }


def test_the_pools_engines_may_connect_to_the_trainer_alone() -> None:
    policy = pool_policy(pooled())
    assert policy is not None
    assert policy["spec"]["podSelector"]["matchLabels"]["sluice.dev/role"] == "trainer"
    [rule] = policy["spec"]["ingress"]
    assert rule == {
        "from": [
            {
                "podSelector": {
                    "matchLabels": {"sluice.dev/pool": "shared", "sluice.dev/role": "engine"}
                }
            }
        ]
    }
    assert pool_policy(make_job()) is None
    assert pool_policy(pooled(networkPolicy={"enabled": False})) is None


def test_a_queue_counts_the_trainer_and_the_workers() -> None:
    queued = world(2, rollout={"minReplicas": 4}, podGroupPolicy={"kueue": {"queueName": "a"}})
    queued.step()
    created = [item for item in queued.step().create if item["kind"] == "Pod"]
    counts = {
        item["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for item in created
    }
    kinds = {item["metadata"]["annotations"]["kueue.x-k8s.io/role-hash"] for item in created}
    assert counts == {"5"}, "a trainer, two workers, buffer and rendezvous"
    assert kinds == {"trainer", "worker", "buffer", "rendezvous"}


def test_a_worker_admitted_apart_is_a_group_of_one() -> None:
    job = pooled(podGroupPolicy={"kueue": {"queueName": "a"}})
    group = PodGroup("demo-rollout-1-1", 1, alone=True)
    [rendered] = gang_pods(
        job, Gang("rollout", 1, 1), 1, "r:1", Images(), group, in_cluster(job, 2)
    )
    assert rendered["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "1"


# -- whether a pool fits


@pytest.mark.parametrize(
    ("pool", "job", "problem"),
    [
        pytest.param({}, {}, "", id="fits"),
        pytest.param(
            {"model": {"path": "/models/other"}},
            {},
            "serves the model /models/other, and spec.model is /models/tiny",
            id="another model",
        ),
        pytest.param(
            {"model": {"path": "tiny", "volume": CLAIM}},
            {},
            "serves the model tiny in the volume",
            id="a volume",
        ),
        pytest.param(
            {"model": {"path": "tiny", "volume": CLAIM}},
            {
                "model": {
                    "path": "/sluice/model/tiny",
                    "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
                }
            },
            "",
            id="the same volume, read only",
        ),
        pytest.param(
            {"model": {"path": "hf://org/name@main"}},
            {"model": {"path": "org/name"}},
            "",
            id="the same repository",
        ),
        pytest.param(
            {"model": {"path": "hf://org/name@v2"}},
            {"model": {"path": "org/name"}},
            "serves the model hf://org/name@v2",
            id="another revision",
        ),
        pytest.param(
            {"model": {"path": "file:///models/tiny"}},
            {},
            "",
            id="the same path",
        ),
        pytest.param(
            {"model": {"path": "/models/tiny", "fp32LmHead": True}},
            {},
            "set spec.model.fp32LmHead: true",
            id="another head",
        ),
        pytest.param(
            {"maxRank": 4}, {}, "up to rank 4, and trainer.lora.rank is 8", id="a larger rank"
        ),
        pytest.param(
            {"maxRank": 8},
            {"trainer": {"lora": {"rank": 8, "initialise": "pissa"}}},
            "trainer.lora.rank is 8, which initialise: pissa doubles",
            id="a rank that is doubled",
        ),
        pytest.param(
            {"targetModules": ["q_proj", "v_proj"]},
            {"trainer": {"lora": {"rank": 8, "targetModules": ["q_proj", "o_proj"]}}},
            "no memory for adapters of o_proj",
            id="another layer",
        ),
        pytest.param(
            {"targetModules": ["q_proj", "v_proj"]},
            {},
            "no memory for adapters of all-linear",
            id="all layers of some",
        ),
        pytest.param(
            {"targetModules": ["q_proj", "v_proj"]},
            {"trainer": {"lora": {"rank": 8, "targetModules": ["q_proj", "v_proj"]}}},
            "",
            id="the same layers",
        ),
        pytest.param({"replicas": 0}, {}, "has no engines: set its replicas", id="no engines"),
    ],
)
def test_a_pool_that_cannot_serve_a_job_says_what_to_do(
    pool: dict[str, Any], job: dict[str, Any], problem: str
) -> None:
    spec = RLEnginePoolSpec.model_validate({"model": {"path": "/models/tiny"}, **pool})
    if "model" in job:
        made = pooled(model={**job["model"], "path": job["model"]["path"]})
    else:
        made = pooled(**job)
    text = misfit(made, spec)
    assert problem in text
    assert bool(text) == bool(problem)
