"""Every pod that we render against the Pod Security Standards."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from sluice.api import RLJob
from sluice_operator.plan import KubeObject, render_all
from tests.pod_security import BASELINE, RESTRICTED, violations
from tests.unit.operator.test_plan_pods import JOBS
from tests.unit.operator.world import make_job

# SGLang's image on GPUs: it runs as root, and keeps its files in root's directories.
ROOT_ENGINE = ["engine: runAsNonRoot must be true", "engine: capabilities must drop ALL"]
GPU_ENGINE: dict[str, Any] = {"gpusPerReplica": 8, "replicas": 1}


def pods(job: RLJob, role: str = "") -> list[KubeObject]:
    of_job = [item for item in render_all(job) if item["kind"] == "Pod"]
    return [item for item in of_job if role in ("", item["metadata"]["labels"]["sluice.dev/role"])]


def of_ours(pod: KubeObject, level: Any) -> list[str]:
    """Return the violations, without those of volumes that the spec names."""
    return [
        violation for violation in violations(pod, level) if not violation.endswith(": hostPath")
    ]


@pytest.mark.parametrize("name", JOBS)
def test_all_pods_are_restricted_but_those_with_sglangs_own_image(name: str) -> None:
    on_gpu = JOBS[name].spec.rollout.gpus_per_replica > 0
    for pod in pods(JOBS[name]):
        is_engine = pod["metadata"]["labels"]["sluice.dev/role"] == "rollout"
        assert of_ours(pod, "baseline") == []
        assert of_ours(pod, "restricted") == (ROOT_ENGINE if is_engine and on_gpu else [])


def test_what_a_user_mounts_is_the_users_matter() -> None:
    (trainer,) = pods(make_job(checkpoint={"volume": {"hostPath": {"path": "/mnt"}}}), "trainer")
    assert violations(trainer, "baseline") == [
        "volume checkpoint: hostPath",
        "volume run: hostPath",
    ]


def test_an_engine_whose_image_needs_no_root_is_restricted_by_a_template() -> None:
    """The example of docs/security.md."""
    context = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "capabilities": {"drop": ["ALL"]},
    }
    template = {"spec": {"containers": [{"name": "engine", "securityContext": context}]}}
    for pod in pods(
        make_job(rollout={**GPU_ENGINE, "nodesPerReplica": 2, "template": template}), "rollout"
    ):
        assert violations(pod, "restricted") == []


@pytest.mark.parametrize("role", ["trainer", "buffer", "rendezvous"])
def test_a_template_sets_another_user_for_the_whole_pod(role: str) -> None:
    overrides = [
        {
            "roles": [role],
            "template": {"spec": {"securityContext": {"runAsUser": 1000, "fsGroup": 1000}}},
        }
    ]
    (pod,) = pods(make_job(podTemplateOverrides=overrides), role)
    assert (
        pod["spec"]["securityContext"].items()
        >= {"runAsUser": 1000, "fsGroup": 1000, "runAsNonRoot": True}.items()
    )
    assert all(
        "runAsUser" not in container["securityContext"] for container in pod["spec"]["containers"]
    )


def test_the_worker_beside_an_engine_of_root_has_a_user_of_its_own() -> None:
    (pod,) = pods(make_job(rollout=GPU_ENGINE), "rollout")
    users = {
        container["name"]: container["securityContext"].get("runAsUser")
        for container in pod["spec"]["containers"]
    }
    assert users == {"engine": None, "worker": 65532}
    assert "runAsUser" not in pod["spec"]["securityContext"], "the engine's user is its image's"


# -- the checks themselves: each finds what it is about
# ---------------------------------------------------------------

FORBIDDEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("_host_namespaces", {"hostNetwork": True}, {}),
    ("_host_process", {"securityContext": {"windowsOptions": {"hostProcess": True}}}, {}),
    ("_privileged", {}, {"securityContext": {"privileged": True}}),
    ("_added_capabilities", {}, {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}),
    ("_host_paths", {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}, {}),
    ("_host_ports", {}, {"ports": [{"containerPort": 1, "hostPort": 1}]}),
    ("_probe_hosts", {}, {"livenessProbe": {"httpGet": {"host": "10.0.0.1", "port": 1}}}),
    ("_app_armor", {}, {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}),
    ("_selinux", {}, {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}),
    ("_proc_mount", {}, {"securityContext": {"procMount": "Unmasked"}}),
    ("_unconfined", {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, {}),
    ("_sysctls", {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, {}),
    ("_volume_types", {"volumes": [{"name": "x", "nfs": {"server": "s", "path": "/"}}]}, {}),
    ("_escalation", {}, {"securityContext": {}}),
    ("_non_root", {}, {"securityContext": {"runAsNonRoot": False}}),
    ("_root_user", {}, {"securityContext": {"runAsUser": 0}}),
    ("_seccomp", {"securityContext": {}}, {}),
    ("_dropped_capabilities", {}, {"securityContext": {"capabilities": {"drop": ["KILL"]}}}),
]


@pytest.mark.parametrize(
    ("check", "spec", "container"), FORBIDDEN, ids=[item[0] for item in FORBIDDEN]
)
def test_each_check_finds_what_it_is_about(
    check: str, spec: dict[str, Any], container: dict[str, Any]
) -> None:
    (fine,) = pods(make_job(), "buffer")
    wrong = copy.deepcopy(fine)
    wrong["spec"] |= spec
    wrong["spec"]["containers"][0] |= container
    (rule,) = [item for item in (*BASELINE, *RESTRICTED) if item.__name__ == check]
    assert list(rule(fine)) == []
    assert list(rule(wrong)) != []


def test_every_check_is_tried() -> None:
    assert [name for name, _, _ in FORBIDDEN] == [
        item.__name__ for item in (*BASELINE, *RESTRICTED)
    ]
