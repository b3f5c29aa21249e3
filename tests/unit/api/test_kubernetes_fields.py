"""Parts of a spec that are Kubernetes' own: their fields are checked before any
cluster sees them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.api import ManifestError, load_job
from sluice.api.job import RLJobSpec
from sluice.api.schema.annotations import field_path
from sluice.api.schema.containers import faults_of_containers
from sluice.api.schema.kubernetes_fields import faults_of, kubernetes_fields
from sluice_cli.render import to_yaml
from sluice_cli.validate.command import validate_file
from sluice_operator.cluster.kube import schema

POD = "spec.podTemplateOverrides[0].template"
WORKER = {"spec": {"containers": [{"name": "worker", "env": []}]}}


def faults(spec: dict[str, Any]) -> dict[str, str]:
    return {field_path(fault.location): fault.text for fault in faults_of(RLJobSpec, spec)}


def in_pod(spec: Any) -> dict[str, Any]:
    return {"podTemplateOverrides": [{"roles": ["trainer"], "template": {"spec": spec}}]}


def container(**fields: Any) -> dict[str, Any]:
    return in_pod({"containers": [{"name": "trainer", **fields}]})


@pytest.mark.parametrize(
    ("spec", "field", "text"),
    [
        (
            in_pod({"nodeSelctor": {"a": "b"}}),
            f"{POD}.spec.nodeSelctor",
            "no such field of a pod's spec; did you mean nodeSelector?",
        ),
        (
            {"trainer": {"template": {"sepc": {}}}},
            "spec.trainer.template.sepc",
            "no such field of a pod template; did you mean spec?",
        ),
        (
            {"rollout": {"template": {"nodeSelector": {}}}},
            "spec.rollout.template.nodeSelector",
            "no such field of a pod template; known: metadata, spec",
        ),
        (
            {"buffer": {"template": {"metadata": {"label": {}}}}},
            "spec.buffer.template.metadata.label",
            "no such field of ObjectMeta; did you mean labels?",
        ),
        (
            container(resources={"limit": {}}),
            f"{POD}.spec.containers[0].resources.limit",
            "no such field of ResourceRequirements; did you mean limits?",
        ),
        (
            container(env=[{"name": "A", "value": 1}]),
            f"{POD}.spec.containers[0].env[0].value",
            "expected a text, found 1; put it in quotes",
        ),
        (
            container(command="python"),
            f"{POD}.spec.containers[0].command",
            "expected a list, found 'python'",
        ),
        (
            in_pod({"terminationGracePeriodSeconds": "30"}),
            f"{POD}.spec.terminationGracePeriodSeconds",
            "expected a whole number, found '30'",
        ),
        (in_pod({"hostNetwork": 1}), f"{POD}.spec.hostNetwork", "expected true or false, found 1"),
        (
            in_pod({"nodeSelector": {"gpu": True}}),
            f"{POD}.spec.nodeSelector.gpu",
            "expected a text, found True; put it in quotes",
        ),
        (in_pod([]), f"{POD}.spec", "expected an object, found []"),
        (
            {"model": {"volume": {"persistentVolumClaim": {}}}},
            "spec.model.volume.persistentVolumClaim",
            "no such field of a volume; did you mean persistentVolumeClaim?",
        ),
        (
            {"checkpoint": {"volume": {"nfs": {"server": "s", "paht": "/"}}}},
            "spec.checkpoint.volume.nfs.paht",
            "no such field of NFSVolumeSource; did you mean path?",
        ),
        (
            {"networkPolicy": {"metricsFrom": [{"podSelecter": {}}]}},
            "spec.networkPolicy.metricsFrom[0].podSelecter",
            "no such field of a network policy's peer; did you mean podSelector?",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("spec.") else "",
)
def test_an_unknown_field_of_a_pod_is_refused_with_a_suggestion(
    spec: dict[str, Any], field: str, text: str
) -> None:
    assert faults(spec) == {field: text}


@pytest.mark.parametrize(
    "spec",
    [
        container(resources={"limits": {"cpu": 4, "memory": "1Gi", "nvidia.com/gpu": 1.5}}),
        container(livenessProbe={"httpGet": {"port": "http"}}, ports=[{"containerPort": 80}]),
        in_pod({"containers": [{"name": "sidecar", "$patch": "delete"}], "tolerations": None}),
        in_pod(
            {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {
                                    "matchExpressions": [
                                        {"key": "a", "operator": "In", "values": ["b"]}
                                    ]
                                }
                            ]
                        }
                    }
                }
            }
        ),
        in_pod({"volumes": [{"name": "v", "emptyDir": {"sizeLimit": 10}}]}),
        {"trainer": {"template": {"metadata": {"annotations": {"a": "b"}}}}},
        {},
    ],
    ids=[
        "quantities",
        "ports",
        "what a merge removes",
        "affinity",
        "volume",
        "metadata",
        "nothing",
    ],
)
def test_fields_that_a_pod_has_are_accepted(spec: dict[str, Any]) -> None:
    assert faults(spec) == {}


def test_the_known_fields_are_those_of_the_kubernetes_client() -> None:
    assert schema.fields() == kubernetes_fields(), "run `make kubernetes-fields`"


def manifest_with(tmp_path: Path, trainer: dict[str, Any]) -> Path:
    job = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"path": "m", "volume": {"emptyDir": {}}},
            "data": {"prompts": [{"path": "p"}]},
            "reward": {"type": "f1"},
            "trainer": {"steps": 1, **trainer},
        },
    }
    path = tmp_path / "job.yaml"
    path.write_text(to_yaml([json.loads(json.dumps(job))]))
    return path


def test_validate_finds_unknown_pod_fields_without_a_cluster(tmp_path: Path) -> None:
    path = manifest_with(
        tmp_path, {"template": {"spec": {"nodeSelctor": {"a": "b"}, "hostNetwork": "yes"}}}
    )
    number = [line.strip() for line in path.read_text().splitlines()].index("nodeSelctor:") + 1
    with pytest.raises(ManifestError) as raised:
        validate_file(path, [])
    first, second = str(raised.value).splitlines()
    assert first == (
        f"{path}:{number}: spec.trainer.template.spec.nodeSelctor: no such field of a pod's spec; "
        "did you mean nodeSelector?"
    )
    assert "spec.trainer.template.spec.hostNetwork: expected true or false, found 'yes'" in second


def test_unknown_pod_fields_of_an_override_are_refused(tmp_path: Path) -> None:
    path = manifest_with(tmp_path, {})
    assert load_job(path, ["trainer.template.spec.priority=1"])
    with pytest.raises(ManifestError, match=r"spec\.trainer\.template\.spec\.prio: no such field"):
        load_job(path, ["trainer.template.spec.prio=1"])


@pytest.mark.parametrize(
    ("spec", "field", "text"),
    [
        pytest.param(
            {"rollout": {"template": {"spec": {"containers": [{"name": "wroker"}]}}}},
            "spec.rollout.template.spec.containers[0].name",
            "no container of rollout pods is named 'wroker' (engine, worker, openenv); give it an "
            "image to add one",
            id="a slip",
        ),
        pytest.param(
            in_pod({"containers": [{"name": "worker", "env": []}]}),
            f"{POD}.spec.containers[0].name",
            "no container of trainer pods is named 'worker' (trainer); give it an image to add one",
            id="of another role",
        ),
        pytest.param(
            in_pod({"initContainers": [{"name": "rows"}]}),
            f"{POD}.spec.initContainers[0].name",
            "no container of trainer pods is named 'rows' (fetch); give it an image to add one",
            id="an init container of another role",
        ),
        pytest.param(
            {
                "podTemplateOverrides": [
                    {
                        "roles": ["rendezvous"],
                        "template": {"spec": {"initContainers": [{"name": "rows"}]}},
                    }
                ]
            },
            "spec.podTemplateOverrides[0].template.spec.initContainers[0].name",
            "no container of rendezvous pods is named 'rows' (they have none); give it an image "
            "to add one",
            id="of a role without any",
        ),
    ],
)
def test_a_template_for_a_container_that_no_pod_has_is_refused(
    spec: dict[str, Any], field: str, text: str
) -> None:
    (fault,) = faults_of_containers(spec)
    assert (field_path(fault.location), fault.text) == (field, text)


@pytest.mark.parametrize(
    "spec",
    [
        {"rollout": {"template": {"spec": {"containers": [{"name": "worker"}]}}}},
        {"trainer": {"template": {"spec": {"containers": [{"name": "proxy", "image": "p:1"}]}}}},
        {
            "trainer": {"template": {"spec": {"containers": [{"name": "proxy", "image": "p:1"}]}}},
            **in_pod({"containers": [{"name": "proxy", "env": []}]}),
        },
        in_pod({"containers": [{"$patch": "delete", "name": "proxy"}]}),
        {"podTemplateOverrides": [{"roles": ["trainer", "rollout"], "template": WORKER}]},
        {"buffer": {"template": {"spec": {"initContainers": [{"name": "rows"}]}}}},
        {"rollout": {"environment": {"template": {"spec": {"containers": [{"name": "episode"}]}}}}},
        {"trainer": {"template": None}},
    ],
    ids=[
        "ours",
        "one of its own",
        "one of another template's",
        "a removal",
        "of one of the roles",
        "an init container",
        "an episode's",
        "no template",
    ],
)
def test_a_template_for_a_container_that_some_pod_has_is_accepted(spec: dict[str, Any]) -> None:
    assert faults_of_containers(spec) == []
