"""Resources of containers: defaults, those of the spec, and those of a template over them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sluice.api.schema.base import quantity_value
from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts.model import Gang, Images
from sluice_operator.plan.manifests.pods import pod
from tests.unit.operator.world import make_job

GPU_JOB: dict[str, Any] = {"trainer": {"gpusPerNode": 8}, "rollout": {"gpusPerReplica": 2}}
ROWS = {"data": {"prompts": [{"source": {"function": "tasks.additions", "rows": 10}}]}}
OPENENV = {"rollout": {"environment": {"openenv": {"image": "wordle:1", "port": 8080}}}}
LARGE_SHM = {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "100Gi"}}
ROLES = ("trainer", "rollout", "buffer", "rendezvous")


def render(role: str, **spec: Any) -> KubeObject:
    return pod(make_job(**spec), Gang(role, 0, 1), 1, 0, "10.0.0.1:7700", Images())  # type: ignore[arg-type]


def resources(role: str, container: str, **spec: Any) -> dict[str, Any]:
    pod_spec = render(role, **spec)["spec"]
    return next(
        item["resources"]
        for item in pod_spec.get("initContainers", []) + pod_spec["containers"]
        if item["name"] == container
    )


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("spec", [ROWS, GPU_JOB], ids=["CPU", "GPU"])
def test_every_container_asks_for_cpu_and_memory(role: str, spec: dict[str, Any]) -> None:
    pod_spec = render(role, **spec)["spec"]
    for container in pod_spec.get("initContainers", []) + pod_spec["containers"]:
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), container["name"]


@pytest.mark.parametrize("role", ["rollout", "buffer"])
def test_init_containers_do_not_make_a_pod_larger(role: str) -> None:
    pod_spec = render(role, **ROWS)["spec"]
    for name in ("cpu", "memory"):
        first = [
            quantity_value(init_container["resources"]["requests"][name])
            for init_container in pod_spec["initContainers"]
        ]
        assert max(first) <= sum(
            quantity_value(container["resources"]["requests"][name])
            for container in pod_spec["containers"]
        )


def test_requests_grow_with_the_gpus() -> None:
    assert resources("trainer", "trainer", **GPU_JOB) == {
        "limits": {"nvidia.com/gpu": 8, "memory": "2048Gi"},
        "requests": {"cpu": "16", "memory": "64Gi"},
    }
    assert resources("rollout", "engine", **GPU_JOB)["requests"] == {"cpu": "4", "memory": "16Gi"}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("spec", [ROWS, GPU_JOB, OPENENV], ids=["CPU", "GPU", "OpenEnv"])
def test_every_container_has_a_memory_limit_no_lower_than_its_request(
    role: str, spec: dict[str, Any]
) -> None:
    pod_spec = render(role, **spec)["spec"]
    for container in pod_spec.get("initContainers", []) + pod_spec["containers"]:
        amounts = container["resources"]
        limit, request = (
            quantity_value(str(amounts[kind]["memory"])) for kind in ("limits", "requests")
        )
        assert limit >= request, container["name"]


def limit(role: str, container: str, **spec: Any) -> Any:
    return resources(role, container, **spec)["limits"]["memory"]


JUDGED = {"reward": {"type": "math", "sandbox": {"processes": 4, "memory": "3Gi"}}}


@pytest.mark.parametrize(
    ("role", "container", "spec", "expected"),
    [
        pytest.param("trainer", "trainer", {}, "32Gi", id="trainer on a CPU"),
        pytest.param("trainer", "trainer", GPU_JOB, "2048Gi", id="trainer on 8 GPUs"),
        pytest.param("rollout", "engine", {}, "32Gi", id="engine on a CPU"),
        pytest.param("rollout", "engine", GPU_JOB, "512Gi", id="engine on 2 GPUs"),
        pytest.param("rollout", "worker", JUDGED, "29Gi", id="judges: 16 + 4 x 3 + samples"),
        pytest.param("buffer", "buffer", {"buffer": {"memory": "8Gi"}}, "8Gi", id="buffer"),
        pytest.param("buffer", "rows", ROWS, "2Gi", id="made rows"),
        pytest.param("rollout", "plugin", {}, "512Mi", id="plugin"),
        pytest.param("rendezvous", "rendezvous", GPU_JOB, "1042Mi", id="8 ranks and an engine"),
    ],
)
def test_limits_follow_from_the_settings(
    role: str, container: str, spec: dict[str, Any], expected: str
) -> None:
    assert limit(role, container, **spec) == expected


def test_programs_beside_the_worker_count_in_its_limit() -> None:
    alone, with_programs = (
        quantity_value(limit("rollout", "worker", rollout={"concurrency": 64} | environment))
        for environment in ({}, {"environment": {"command": ["agent"]}})
    )
    assert with_programs - alone == 64 * 2**28


def test_the_buffers_limit_is_its_request() -> None:
    assert resources("buffer", "buffer")["requests"]["memory"] == "2Gi"


def test_a_request_above_the_default_limit_raises_it() -> None:
    trainer = {"resources": {"requests": {"memory": "64Gi"}}}
    assert limit("trainer", "trainer", trainer=trainer) == "64Gi"


@pytest.mark.parametrize(
    ("role", "container", "spec", "expected"),
    [
        pytest.param("trainer", "trainer", {}, "16384Mi", id="half of the default limit"),
        pytest.param(
            "trainer",
            "trainer",
            {"trainer": {"resources": {"limits": {"memory": "6Gi"}}}},
            "3072Mi",
            id="half of the spec's limit",
        ),
        pytest.param(
            "rollout",
            "engine",
            {"rollout": {"template": {"spec": {"volumes": [LARGE_SHM]}}}},
            "100Gi",
            id="that of a template",
        ),
    ],
)
def test_shared_memory_has_a_size(
    role: str, container: str, spec: dict[str, Any], expected: str
) -> None:
    volumes = {volume["name"]: volume for volume in render(role, **spec)["spec"]["volumes"]}
    assert volumes["dshm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": expected}


def test_shared_memory_of_the_host_is_left_alone() -> None:
    host = {"name": "dshm", "hostPath": {"path": "/dev/shm"}}
    rollout = {"template": {"spec": {"volumes": [host]}}}
    volumes = {
        volume["name"]: volume for volume in render("rollout", rollout=rollout)["spec"]["volumes"]
    }
    assert volumes["dshm"] == host


def test_what_the_spec_names_replaces_the_default_and_the_rest_stays() -> None:
    rollout = {
        "resources": {"requests": {"cpu": 3}},
        "workerResources": {"limits": {"memory": "4Gi"}},
    }
    assert resources("rollout", "engine", rollout=rollout)["requests"] == {
        "cpu": "3",
        "memory": "1Gi",
    }
    worker = resources("rollout", "worker", rollout=rollout)
    assert worker == {"limits": {"memory": "4Gi"}, "requests": {"cpu": "100m"}}, (
        "the limit is the request, too"
    )


def test_a_limit_beside_gpus_keeps_the_gpus() -> None:
    trainer = {"gpusPerNode": 8, "resources": {"limits": {"memory": "1Ti"}}}
    merged = resources("trainer", "trainer", trainer=trainer)
    assert merged == {"limits": {"nvidia.com/gpu": 8, "memory": "1Ti"}, "requests": {"cpu": "16"}}


def test_a_template_goes_over_the_spec() -> None:
    template = {
        "spec": {"containers": [{"name": "trainer", "resources": {"limits": {"memory": "512Mi"}}}]}
    }
    trainer = {"resources": {"requests": {"cpu": 3}}, "template": template}
    merged = resources("trainer", "trainer", trainer=trainer)
    assert merged == {"limits": {"memory": "512Mi"}, "requests": {"cpu": "3"}}


def test_containers_of_the_user_ask_for_what_he_says() -> None:
    template = {"spec": {"containers": [{"name": "logs", "image": "logs:1"}]}}
    merged = {
        container["name"]: container
        for container in render("trainer", trainer={"template": template})["spec"]["containers"]
    }
    assert merged["logs"] == {"name": "logs", "image": "logs:1"}


def test_a_templates_claims_are_added_to_ours() -> None:
    mine = {"name": "nic"}
    template = {"spec": {"containers": [{"name": "trainer", "resources": {"claims": [mine]}}]}}
    trainer = {"gpusPerNode": 2, "colocate": True, "template": template}
    merged = resources("trainer", "trainer", trainer=trainer, rollout={"gpusPerReplica": 1})
    assert merged["claims"] == [{"name": "gpus"}, mine]


def test_gpus_are_asked_for_by_their_own_fields() -> None:
    with pytest.raises(ValidationError, match=r"gpusPerNode and rollout\.gpusPerReplica"):
        make_job(trainer={"resources": {"limits": {"nvidia.com/gpu": 4}}})
