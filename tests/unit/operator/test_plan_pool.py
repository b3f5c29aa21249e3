"""The objects, the status and the events of an RLEnginePool."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.plan import Images, KubeObject
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS, JobDefaults
from sluice_operator.plan.facts.model import Deletion, KubeletWarning
from sluice_operator.plan.manifests.engine_pool import pool_objects
from sluice_operator.plan.pool import PoolObserved, invalid_status
from tests.unit.operator import golden
from tests.unit.operator.pool_world import (
    after,
    changed,
    ended,
    engine_pod,
    make_pool,
    planned,
    with_status,
)
from tests.unit.operator.world import START

CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}
PEER = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
ON_GPU: dict[str, Any] = {
    "model": {"path": "qwen3-8b", "volume": CLAIM},
    "gpusPerReplica": 2,
    "kueue": {"queueName": "engines", "priorityClass": "high"},
}


def stateful_set(defaults: JobDefaults = NO_DEFAULTS, **spec: Any) -> KubeObject:
    return pool_objects(make_pool(**spec), Images(), defaults)[2]


def pod_spec(defaults: JobDefaults = NO_DEFAULTS, **spec: Any) -> dict[str, Any]:
    fields: dict[str, Any] = stateful_set(defaults, **spec)["spec"]["template"]["spec"]
    return fields


def engine(**spec: Any) -> dict[str, Any]:
    (container,) = pod_spec(**spec)["containers"]
    return dict(container)


# -- objects


def test_rendered_objects() -> None:
    observed = PoolObserved(operator_namespace="sluice-system")
    objects = planned(make_pool(**ON_GPU), observed).create
    golden.assert_golden("engine-pool.yaml", golden.to_yaml(*objects))


def test_a_pool_is_settled_once_its_objects_exist() -> None:
    pool = make_pool()
    assert planned(pool, after(pool)).create == ()


def test_an_engine_on_cpus_is_not_root_and_has_no_gpu() -> None:
    spec = pod_spec()
    assert spec["securityContext"]["runAsNonRoot"]
    assert "nvidia.com/gpu" not in spec["containers"][0]["resources"]["limits"]


def test_only_the_engine_has_the_key() -> None:
    def has_key(container: dict[str, Any]) -> bool:
        return "SLUICE_POOL_KEY" in {entry["name"] for entry in container["env"]}

    spec = pod_spec()
    assert [has_key(container) for container in spec["containers"]] == [True]
    assert [has_key(container) for container in spec["initContainers"]] == [False]
    (secret, *_) = pool_objects(make_pool(), Images(), NO_DEFAULTS)
    assert "stringData" not in secret


def test_a_template_changes_the_pods_but_not_how_they_are_found() -> None:
    template = {
        "metadata": {"labels": {"team": "a", "sluice.dev/pool": "other"}},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}],
            "nodeSelector": {"gpu": "h200"},
        },
    }
    made = stateful_set(template=template)["spec"]["template"]
    assert made["metadata"]["labels"]["team"] == "a"
    assert made["metadata"]["labels"]["sluice.dev/pool"] == "shared"
    assert made["spec"]["restartPolicy"] == "Always"
    assert made["spec"]["nodeSelector"] == {"gpu": "h200"}
    assert {"name": "A", "value": "1"} in made["spec"]["containers"][0]["env"]


def test_the_clusters_defaults_for_engines_apply() -> None:
    defaults = JobDefaults.model_validate(
        {
            "nodeSelector": {"pool": "gpu"},
            "otlpEndpoint": "http://otel",
            "rollout": {
                "nodeSelector": {"gpu": "h200"},
                "resources": {"requests": {"cpu": "8", "memory": "64Gi"}},
            },
            "kernelCache": {"volume": CLAIM},
        }
    )
    spec = pod_spec(defaults, gpusPerReplica=1, resources={"requests": {"cpu": "4"}})
    (container,) = spec["containers"]
    assert spec["nodeSelector"] == {"pool": "gpu", "gpu": "h200"}
    assert container["resources"]["requests"] == {"cpu": "4", "memory": "64Gi"}
    assert {"name": "cache", "mountPath": "/sluice/cache", "subPath": "rollout"} in container[
        "volumeMounts"
    ]


def test_a_claim_with_model_and_cache_is_one_volume() -> None:
    """A kubelet waits for ever for a pod that names a claim twice."""
    defaults = JobDefaults.model_validate({"kernelCache": {"volume": CLAIM}})
    spec = pod_spec(defaults, gpusPerReplica=1, model={"path": "m", "volume": CLAIM})
    claims = [volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
    assert [volume["name"] for volume in claims] == ["model"]
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["/sluice/model"] == mounts["/sluice/cache"] == "model"


def test_kueue_finds_its_labels_on_the_stateful_set() -> None:
    labels = stateful_set(**ON_GPU)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "engines"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"


def test_one_engine_has_no_budget_and_a_disabled_policy_goes() -> None:
    two = make_pool()
    one = changed(two, replicas=1, networkPolicy={"enabled": False})
    assert planned(one, after(two)).delete == (
        Deletion("PodDisruptionBudget", "shared-engine"),
        Deletion("NetworkPolicy", "shared-engines"),
    )


def test_a_cluster_without_a_kind_does_without_it() -> None:
    absent = frozenset({"PodDisruptionBudget", "NetworkPolicy"})
    kinds = [
        manifest["kind"]
        for manifest in planned(make_pool(), PoolObserved(absent_kinds=absent)).create
    ]
    assert kinds == ["Secret", "Service", "StatefulSet"]


@pytest.mark.parametrize(
    ("spec", "reasons"),
    [
        pytest.param({"replicas": 3}, ["Scaled"], id="scaled"),
        pytest.param({"maxRank": 64}, ["EnginesReplaced"], id="replaced"),
        pytest.param({"networkPolicy": {"metricsFrom": [PEER]}}, [], id="policy"),
    ],
)
def test_a_changed_spec_changes_its_objects_and_is_told(
    spec: dict[str, Any], reasons: list[str]
) -> None:
    pool = make_pool()
    decision = planned(changed(pool, **spec), after(pool))
    assert len(decision.create) == 1
    assert [event.reason for event in decision.events] == reasons


# -- status


def test_the_status_counts_engines_jobs_and_tokens() -> None:
    pool = make_pool()
    observed = after(
        pool,
        engine_pod(0),
        engine_pod(1, ready=False),
        jobs=("a", "b"),
        tokens_per_second=1234.56,
    )
    status = planned(pool, observed).status
    assert (status.engines, status.replicas, status.ready_replicas) == ("1/2", 2, 1)
    assert (status.jobs, status.tokens_per_second) == (2, "1235")
    assert status.selector == "sluice.dev/pool=shared,sluice.dev/role=engine"


def test_a_pod_that_ends_does_not_count() -> None:
    pool, leaving = make_pool(), engine_pod(1)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    status = planned(pool, after(pool, engine_pod(0), leaving)).status
    assert (status.replicas, status.ready_replicas) == (1, 1)


TRACEBACK = 'Traceback\n  File "x.py"\nRuntimeError: out of memory\n'


@pytest.mark.parametrize(
    ("pods", "status", "message"),
    [
        pytest.param([], "False", "0 of 2 engines answer", id="none"),
        pytest.param([engine_pod(0), engine_pod(1)], "True", "2 of 2 engines answer", id="all"),
        pytest.param(
            [engine_pod(0), engine_pod(1, ready=False)], "False", "1 of 2 engines answer", id="one"
        ),
        pytest.param(
            [engine_pod(0), engine_pod(1, ready=False, **ended(1, TRACEBACK))],
            "False",
            "1 of 2 engines answer; shared-engine-1: engine: RuntimeError: out of memory",
            id="failed",
        ),
        pytest.param(
            [engine_pod(0, ready=False, **ended(137, reason="OOMKilled"))],
            "False",
            "0 of 2 engines answer; shared-engine-0: engine: OOMKilled; it used more memory than "
            "its limit: raise spec.resources.limits.memory",
            id="out of memory",
        ),
        pytest.param(
            [
                engine_pod(
                    0, ready=False, **ended(1, "error: old", finishedAt="2026-01-31T11:00:00Z")
                ),
                engine_pod(1, ready=False, **ended(1, "error: new")),
            ],
            "False",
            "0 of 2 engines answer; shared-engine-1: engine: new",
            id="newest",
        ),
        pytest.param(
            [
                engine_pod(
                    0,
                    ready=False,
                    phase="Pending",
                    containerStatuses=[],
                    conditions=[
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                        }
                    ],
                )
            ],
            "False",
            "0 of 2 engines answer; shared-engine-0: Unschedulable: 0/3 nodes are available: 3 "
            "Insufficient nvidia.com/gpu; no node has enough free nvidia.com/gpu: wait, add nodes, "
            "or request less",
            id="unschedulable",
        ),
    ],
)
def test_ready_says_why_engines_do_not_answer(
    pods: list[KubeObject], status: str, message: str
) -> None:
    pool = make_pool()
    (condition,) = planned(pool, after(pool, *pods)).status.conditions
    assert (condition.status, condition.message) == (status, message)


def test_a_kubelets_warning_is_a_cause() -> None:
    pool = make_pool()
    pod = engine_pod(0, ready=False, phase="Pending", containerStatuses=[])
    warned = {"shared-engine-0": KubeletWarning("FailedMount", 'configmap "x" not found')}
    (condition,) = planned(pool, after(pool, pod, warned=warned)).status.conditions
    assert 'shared-engine-0: FailedMount: configmap "x" not found' in condition.message


def test_without_replicas_it_is_not_ready() -> None:
    pool = make_pool(replicas=0)
    (condition,) = planned(pool, after(pool)).status.conditions
    assert (condition.status, condition.reason) == ("False", "NoEngines")


def test_a_refusal_of_the_api_server_is_in_the_message() -> None:
    observed = PoolObserved(note="exceeded quota: gpus")
    (condition,) = planned(make_pool(), observed).status.conditions
    assert condition.message == "0 of 2 engines answer; exceeded quota: gpus"


def test_the_time_of_a_transition_stays_until_the_next_one() -> None:
    pool = make_pool()
    first = planned(pool, after(pool)).status.conditions[0]
    later = pool.model_copy(
        update={
            "status": planned(pool, after(pool)).status.model_copy(
                update={
                    "conditions": [
                        first.model_copy(update={"last_transition_time": "2026-01-01T00:00:00Z"})
                    ]
                }
            )
        }
    )
    one = planned(later, after(pool, engine_pod(0))).status.conditions[0]
    both = planned(later, after(pool, engine_pod(0), engine_pod(1))).status.conditions[0]
    assert one.last_transition_time == "2026-01-01T00:00:00Z"
    assert both.last_transition_time == first.last_transition_time == "2026-01-31T12:00:00Z"


def test_a_queue_is_a_cause() -> None:
    pool, pod = make_pool(), engine_pod(0, ready=False, phase="Pending", containerStatuses=[])
    pod["spec"] = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "engines"
    (condition,) = planned(pool, after(pool, pod)).status.conditions
    assert condition.message == (
        "0 of 2 engines answer; shared-engine-0 waits for admission by the queue engines"
    )


# -- dead nodes


def leaving(ended_at: str) -> KubeObject:
    """Return a pod that was deleted, and whose grace period ended then."""
    pod = engine_pod(1, ready=False)
    pod["metadata"]["deletionTimestamp"] = ended_at
    return pod


def test_a_pod_on_a_dead_node_is_deleted_by_force() -> None:
    pool = make_pool()
    decision = planned(pool, after(pool, engine_pod(0), leaving("2026-01-31T11:55:00Z")))
    assert decision.delete == (Deletion("Pod", "shared-engine-1", 0),)
    assert [event.reason for event in decision.events] == ["PodForceDeleted"]


def test_a_pod_that_may_still_end_is_waited_for() -> None:
    pool = make_pool()
    decision = planned(pool, after(pool, engine_pod(0), leaving("2026-01-31T11:55:10Z")))
    assert (decision.delete, decision.requeue_after) == ((), 10)


# -- events

BOTH = (engine_pod(0), engine_pod(1))
CRASHED = engine_pod(1, ready=False, **ended(1, "error: no memory"))


def test_engines_that_become_ready_are_told_once() -> None:
    pool = make_pool()
    started = with_status(pool, planned(pool, after(pool)))
    first = planned(started, after(pool, *BOTH))
    assert [(event.type, event.reason) for event in first.events] == [("Normal", "EnginesReady")]
    assert planned(with_status(pool, first), after(pool, *BOTH)).events == ()


@pytest.mark.parametrize(
    ("lost", "type_"),
    [
        pytest.param((), "Normal", id="replaced"),
        pytest.param((CRASHED,), "Warning", id="failed"),
    ],
)
def test_an_engine_that_is_lost_is_told_once(lost: tuple[KubeObject, ...], type_: str) -> None:
    pool = make_pool()
    ready = with_status(pool, planned(pool, after(pool, *BOTH)))
    observed = after(pool, engine_pod(0), *lost)
    first = planned(ready, observed)
    assert [(event.type, event.reason) for event in first.events] == [(type_, "EnginesNotReady")]
    assert planned(with_status(pool, first), observed).events == ()


def test_engines_that_start_after_a_change_are_no_warning() -> None:
    pool = make_pool()
    ready = with_status(pool, planned(pool, after(pool, *BOTH)))
    decision = planned(changed(ready, replicas=3), after(pool, *BOTH))
    assert [event.type for event in decision.events] == ["Normal"]


def test_another_cause_is_told_too() -> None:
    pool = make_pool()
    failed = with_status(pool, planned(pool, after(pool, engine_pod(0), CRASHED)))
    other = engine_pod(1, ready=False, **ended(1, "error: no disk"))
    (event,) = planned(failed, after(pool, engine_pod(0), other)).events
    assert event.message == "1 of 2 engines answer; shared-engine-1: engine: no disk"


# -- ends


def ending() -> Any:
    pool = make_pool()
    extra = {"deletionTimestamp": "2026-01-31T12:00:00Z"}
    metadata = pool.metadata.model_validate(pool.metadata.model_dump() | extra)
    return pool.model_copy(update={"metadata": metadata})


def test_a_pool_that_is_deleted_gets_no_objects_and_says_who_uses_it() -> None:
    first = planned(ending(), PoolObserved(jobs=("a", "b")))
    assert first.create == ()
    (condition,) = first.status.conditions
    assert condition.message == "the pool is being deleted; unfinished jobs use it: a, b"
    assert [(event.reason, event.message) for event in first.events] == [
        ("DeletedInUse", "the pool is deleted while jobs use it, which then wait: a, b")
    ]
    again = planned(with_status(ending(), first), PoolObserved(jobs=("a", "b")))
    assert again.events == ()


def test_a_pool_that_no_job_uses_is_deleted_in_silence() -> None:
    assert planned(ending()).events == ()


def test_an_invalid_pool_keeps_the_rest_of_its_status() -> None:
    pool = make_pool()
    before = planned(pool, after(pool, *BOTH)).status
    stored = {
        "metadata": {"generation": 2},
        "status": before.model_dump(mode="json", by_alias=True),
    }
    status, event = invalid_status(stored, "spec.maxRank: at least 1", START)
    assert (status.engines, status.observed_generation) == ("2/2", 2)
    assert (status.conditions[0].status, event.reason) == ("False", "InvalidSpec")
