"""Resources of containers: never none, those of the spec, and those of a template over them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sluice.api.base import quantity_value
from sluice_operator.plan import KubeObject
from sluice_operator.plan.manifests.pods import pod
from sluice_operator.plan.model import Gang, Images
from tests.unit.operator.world import make_job

GPU_JOB: dict[str, Any] = {"trainer": {"gpusPerNode": 8}, "rollout": {"gpusPerReplica": 2}}
ROWS = {"data": {"prompts": [{"source": {"function": "tasks.additions", "rows": 10}}]}}
ROLES = ("trainer", "rollout", "buffer", "rendezvous")


def render(role: str, **spec: Any) -> KubeObject:
    return pod(make_job(**spec), Gang(role, 0, 1), 1, 0, "10.0.0.1:7700", Images())  # type: ignore[arg-type]


def resources(role: str, container: str, **spec: Any) -> dict[str, Any]:
    pod_spec = render(role, **spec)["spec"]
    return next(
        each["resources"]
        for each in pod_spec.get("initContainers", []) + pod_spec["containers"]
        if each["name"] == container
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
            quantity_value(each["resources"]["requests"][name])
            for each in pod_spec["initContainers"]
        ]
        assert max(first) <= sum(
            quantity_value(each["resources"]["requests"][name]) for each in pod_spec["containers"]
        )


def test_requests_grow_with_the_gpus() -> None:
    assert resources("trainer", "trainer", **GPU_JOB) == {
        "limits": {"nvidia.com/gpu": 8},
        "requests": {"cpu": "16", "memory": "64Gi"},
    }
    assert resources("rollout", "engine", **GPU_JOB)["requests"] == {"cpu": "4", "memory": "16Gi"}


def test_only_the_buffer_has_a_limit_which_is_its_request() -> None:
    limits = {
        each["name"]: each["resources"]["limits"]
        for role in ROLES
        for each in render(role)["spec"]["containers"]
        if "limits" in each["resources"]
    }
    assert limits == {"buffer": {"memory": "2Gi"}}
    assert resources("buffer", "buffer")["requests"]["memory"] == "2Gi"


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
    wanted = resources("trainer", "trainer", trainer=trainer)
    assert wanted == {"limits": {"nvidia.com/gpu": 8, "memory": "1Ti"}, "requests": {"cpu": "16"}}


def test_a_template_goes_over_the_spec() -> None:
    template = {
        "spec": {"containers": [{"name": "trainer", "resources": {"limits": {"memory": "512Mi"}}}]}
    }
    trainer = {"resources": {"requests": {"cpu": 3}}, "template": template}
    wanted = resources("trainer", "trainer", trainer=trainer)
    assert wanted == {"limits": {"memory": "512Mi"}, "requests": {"cpu": "3"}}


def test_containers_of_the_user_ask_for_what_he_says() -> None:
    template = {"spec": {"containers": [{"name": "logs", "image": "logs:1"}]}}
    wanted = {
        each["name"]: each
        for each in render("trainer", trainer={"template": template})["spec"]["containers"]
    }
    assert wanted["logs"] == {"name": "logs", "image": "logs:1"}


def test_a_templates_claims_are_added_to_ours() -> None:
    mine = {"name": "nic"}
    template = {"spec": {"containers": [{"name": "trainer", "resources": {"claims": [mine]}}]}}
    trainer = {"gpusPerNode": 2, "colocate": True, "template": template}
    wanted = resources("trainer", "trainer", trainer=trainer, rollout={"gpusPerReplica": 1})
    assert wanted["claims"] == [{"name": "gpus"}, mine]


def test_gpus_are_asked_for_by_their_own_fields() -> None:
    with pytest.raises(ValidationError, match=r"gpusPerNode and rollout\.gpusPerReplica"):
        make_job(trainer={"resources": {"limits": {"nvidia.com/gpu": 4}}})
