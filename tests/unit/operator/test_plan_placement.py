"""Pods have wishes about their place, of which users may change some."""

from dataclasses import fields
from typing import Any

import pytest

from sluice.api import RLJob
from sluice_buffer.__main__ import _GRACE_SECONDS
from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts.constants import GRACE
from sluice_operator.plan.facts.model import Gang, Images
from sluice_operator.plan.manifests.placement import HOST, STAY, ZONE
from sluice_operator.plan.manifests.pods import pod
from sluice_operator.plan.manifests.render import render_all
from sluice_rollout.worker import RETURN_SECONDS, Worker
from tests.unit.operator.world import make_job

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Worker)}
DRAIN_SECONDS = float(DEFAULTS["drain_seconds"])
# What a role allows itself after SIGTERM.
NEEDED_SECONDS = {"rollout": DRAIN_SECONDS + RETURN_SECONDS, "buffer": _GRACE_SECONDS}


def render(job: RLJob, role: Any) -> KubeObject:
    return pod(job, Gang(role, 0, 1), 1, 0, "10.0.0.1:7700", Images())


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_trainer_and_engines_prefer_one_zone_and_demand_nothing(role: str) -> None:
    affinity = render(make_job(), role)["spec"]["affinity"]["podAffinity"]
    assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == ZONE
    assert term["podAffinityTerm"]["labelSelector"]["matchLabels"] == {
        "sluice.dev/job-name": "demo"
    }


def test_engines_are_spread_over_machines_where_there_is_a_choice() -> None:
    (constraint,) = render(make_job(), "rollout")["spec"]["topologySpreadConstraints"]
    assert (constraint["topologyKey"], constraint["whenUnsatisfiable"]) == (HOST, "ScheduleAnyway")
    assert "topologySpreadConstraints" not in render(make_job(), "trainer")["spec"]


@pytest.mark.parametrize("role", ["trainer", "rollout", "buffer", "rendezvous"])
def test_autoscalers_leave_pods_alone_that_they_would_move_to_save_a_machine(role: str) -> None:
    assert render(make_job(), role)["metadata"]["annotations"].items() >= STAY.items()


def test_users_may_let_autoscalers_move_pods() -> None:
    annotations = {
        "karpenter.sh/do-not-disrupt": "false",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": None,
    }
    overrides = [{"roles": ["rollout"], "template": {"metadata": {"annotations": annotations}}}]
    merged = render(make_job(podTemplateOverrides=overrides), "rollout")["metadata"]["annotations"]
    assert merged == {"karpenter.sh/do-not-disrupt": "false"}


@pytest.mark.parametrize(("role", "needs"), NEEDED_SECONDS.items())
def test_the_grace_of_a_role_covers_what_it_does_at_its_end(role: str, needs: float) -> None:
    assert render(make_job(), role)["spec"]["terminationGracePeriodSeconds"] >= 1.5 * needs


def test_a_trainer_gets_time_for_a_step_a_checkpoint_and_an_update_that_waits() -> None:
    trainer = render(make_job(weightSync={"timeoutSeconds": 45.5}), "trainer")
    assert trainer["spec"]["terminationGracePeriodSeconds"] == GRACE["trainer"] + 46


def test_users_choose_nodes_priority_account_and_grace() -> None:
    override = {
        "priorityClassName": "high",
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "registry"}],
        "terminationGracePeriodSeconds": 1800,
    }
    overrides = [{"roles": ["trainer"], "template": {"spec": override}}]
    pod_spec = render(make_job(podTemplateOverrides=overrides), "trainer")["spec"]
    assert {key: pod_spec[key] for key in override} == override


def test_users_remove_or_replace_our_wishes() -> None:
    spec = {
        "affinity": None,
        "topologySpreadConstraints": [{"$patch": "delete", "topologyKey": HOST}],
    }
    pod_spec = render(make_job(rollout={"template": {"spec": spec}}), "rollout")["spec"]
    assert "affinity" not in pod_spec
    assert pod_spec["topologySpreadConstraints"] == []


def test_topology_aware_scheduling_of_kueue_is_asked_for_by_annotation() -> None:
    key = "kueue.x-k8s.io/podset-required-topology"
    template = {"metadata": {"annotations": {key: "cloud.provider.com/topology-rack"}}}
    job = make_job(podGroupPolicy={"kueue": {"queueName": "q"}}, trainer={"template": template})
    trainer = next(
        item for item in render_all(job) if item["metadata"]["name"] == "demo-trainer-0-1-0"
    )
    annotations = trainer["metadata"]["annotations"]
    assert annotations[key] == "cloud.provider.com/topology-rack"
    assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "4"


def test_rdma_by_template() -> None:
    """The example of docs/pods.md."""
    trainer = {
        "name": "trainer",
        "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
        "resources": {"limits": {"rdma/hca": 1}},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    job = make_job(trainer={"gpusPerNode": 8, "template": {"spec": {"containers": [trainer]}}})
    (container,) = render(job, "trainer")["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 8, "rdma/hca": 1, "memory": "2048Gi"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }
    assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in container["env"]


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_processes_share_memory_beyond_the_default_of_64_mb(role: str) -> None:
    spec = render(make_job(), role)["spec"]
    shared = {"medium": "Memory", "sizeLimit": "16384Mi"}
    assert {"name": "dshm", "emptyDir": shared} in spec["volumes"]
    for container in spec["containers"]:
        assert {"name": "dshm", "mountPath": "/dev/shm"} in container["volumeMounts"]
