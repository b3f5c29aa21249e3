"""Variables of pods for NCCL.

Pods in a cluster have no such variables: the cluster and the user decide about MNNVL and NVLS.
"""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.cluster.local.translate import HostBindings, commands, inherited_env
from sluice_operator.plan.facts.model import Gang, Images, KubeObject
from sluice_operator.plan.manifests.pods import pod
from tests.unit.operator.world import make_job

CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"


def render(role: Any, **spec: Any) -> KubeObject:
    gpus = {"trainer": {"gpusPerNode": 8}, "rollout": {"gpusPerReplica": 8}}
    return pod(make_job(**{**gpus, **spec}), Gang(role, 0, 1), 1, 0, "10.0.0.1:7700", Images())


def in_cluster(manifest: KubeObject, container: str) -> dict[str, str]:
    (selected,) = [item for item in manifest["spec"]["containers"] if item["name"] == container]
    return {
        variable["name"]: variable["value"]
        for variable in selected["env"]
        if variable["name"].startswith("NCCL_")
    }


def on_one_machine(manifest: KubeObject, container: str) -> dict[str, str]:
    manifest["spec"] = {
        "containers": [item for item in manifest["spec"]["containers"] if item["name"] == container]
    }
    for stored in manifest["spec"]["containers"]:
        stored["volumeMounts"] = []
        stored["env"] = [entry for entry in stored["env"] if "valueFrom" not in entry]
    (command,) = commands(manifest, HostBindings({}, {}, {}, {}), inherited_env())
    return {name: command.env[name] for name in (CUMEM, NVLS)}


def test_in_a_cluster_nothing_is_switched_off() -> None:
    assert in_cluster(render("trainer"), "trainer") == {}
    assert in_cluster(render("rollout"), "engine") == {CUMEM: "-2"}, (
        "NCCL's own default, which SGLang leaves alone"
    )


def test_an_engine_without_gpus_has_no_nccl() -> None:
    assert in_cluster(render("rollout", rollout={"gpusPerReplica": 0}), "engine") == {}


@pytest.mark.parametrize(("role", "container"), [("trainer", "trainer"), ("rollout", "engine")])
def test_users_say_otherwise_by_a_template(role: str, container: str) -> None:
    own = {"name": container, "env": [{"name": CUMEM, "value": "1"}, {"name": NVLS, "value": "0"}]}
    overrides = [{"roles": ["trainer", "rollout"], "template": {"spec": {"containers": [own]}}}]
    assert in_cluster(render(role, podTemplateOverrides=overrides), container) == {
        CUMEM: "1",
        NVLS: "0",
    }
    assert on_one_machine(render(role, podTemplateOverrides=overrides), container) == {
        CUMEM: "1",
        NVLS: "0",
    }


@pytest.mark.parametrize(("role", "container"), [("trainer", "trainer"), ("rollout", "engine")])
def test_on_one_machine_both_are_off_at_both_ends_unless_its_user_says_otherwise(
    role: str, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CUMEM, raising=False)
    monkeypatch.setenv(NVLS, "1")
    assert on_one_machine(render(role), container) == {CUMEM: "0", NVLS: "1"}
