"""Additions of an administrator: defaults of jobs, labels, annotations, volumes, arguments, bounds
of the operator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sluice_operator import settings
from sluice_operator.plan.facts.job_defaults import JobDefaults
from tests.helm import CHART, Object, environment, find_object, helm, objects

SERVED = ("--api-versions", "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy")
POLICY = "ValidatingAdmissionPolicy"


def kinds(manifests: list[Object]) -> set[str]:
    return {manifest["kind"] for manifest in manifests}


def operator(manifests: list[Object]) -> Object:
    pod: Object = find_object(manifests, "Deployment")["spec"]["template"]
    return pod


def test_defaults_of_jobs_reach_the_operator() -> None:
    manifests = objects("everything")
    config = find_object(manifests, "ConfigMap", "trainer-of-models-job-defaults")
    defaults = JobDefaults.model_validate(json.loads(config["data"]["defaults.json"]))
    assert (defaults.storage_class_name, defaults.priority_class_name) == ("fast", "batch")
    assert defaults.trainer.resources.requests == {"cpu": "96", "memory": "1200Gi"}
    assert defaults.trainer.tolerations == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert defaults.rendezvous.node_selector == {"pool": "system"}
    pod = operator(manifests)["spec"]
    (mount,) = [
        volume_mount
        for volume_mount in pod["containers"][0]["volumeMounts"]
        if volume_mount["name"] == "job-defaults"
    ]
    (volume,) = [candidate for candidate in pod["volumes"] if candidate["name"] == "job-defaults"]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    assert environment(manifests)["SLUICE_JOB_DEFAULTS"] == f"{mount['mountPath']}/defaults.json"


def test_other_defaults_are_other_pods_of_the_operator() -> None:
    """It reads them when it starts."""
    one_way, another = (
        operator(objects("defaults", "--set", f"jobDefaults.storageClassName={name}"))["metadata"][
            "annotations"
        ]
        for name in ("fast", "slow")
    )
    assert one_way.keys() == another.keys() == {"checksum/job-defaults"}
    assert one_way != another


def test_without_defaults_nothing_is_mounted() -> None:
    manifests = objects()
    assert "ConfigMap" not in kinds(manifests)
    assert "SLUICE_JOB_DEFAULTS" not in environment(manifests)
    assert "annotations" not in operator(manifests)["metadata"]


def test_common_labels_and_annotations_are_everywhere() -> None:
    manifests = objects("everything")
    assert "ValidatingAdmissionPolicyBinding" in kinds(manifests)
    for manifest in [*manifests, operator(manifests)]:
        assert manifest["metadata"]["labels"]["team"] == "research", manifest
        assert manifest["metadata"]["annotations"]["owner"] == "infra", manifest


def test_what_is_more_special_goes_over_a_common_annotation() -> None:
    manifests = objects("everything", "--set", "annotations.owner=mine,podAnnotations.owner=ours")
    assert find_object(manifests, "Deployment")["metadata"]["annotations"]["owner"] == "mine"
    assert operator(manifests)["metadata"]["annotations"]["owner"] == "ours"


def test_the_operator_gets_more_environment_volumes_and_arguments() -> None:
    manifests = objects("everything")
    pod = operator(manifests)["spec"]
    container = pod["containers"][0]
    assert {"name": "TZ", "value": "UTC"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "more"}}]
    assert {"name": "ca", "mountPath": "/etc/ssl/ours", "readOnly": True} in container[
        "volumeMounts"
    ]
    assert {"name": "ca", "configMap": {"name": "our-ca"}} in pod["volumes"]
    fields = {"SLUICE_NAMESPACE": "x", "SLUICE_IDENTITY": "y"}
    variables = {**environment(objects()), **fields}
    assert settings.read(variables, container["args"]).resync_seconds == 300


@pytest.mark.parametrize(
    ("arguments", "bounded"),
    [
        pytest.param((), True, id="by default"),
        pytest.param(("--kube-version", "1.30.0"), True, id="the first release that has it"),
        pytest.param(("--kube-version", "1.31.4-gke.1256000"), True, id="a vendor's release"),
        pytest.param(("--kube-version", "1.29.0", *SERVED), True, id="served by an older one"),
        pytest.param(("--set", "admissionPolicy.enabled=false"), False, id="switched off"),
        pytest.param(("--set", "watchNamespaces={team-a}"), False, id="nothing of the cluster"),
        pytest.param(("--kube-version", "1.29.0"), False, id="an older cluster"),
    ],
)
def test_the_operator_is_bounded_where_the_cluster_can(
    arguments: tuple[str, ...], bounded: bool
) -> None:
    assert (POLICY in kinds(objects("defaults", *arguments))) is bounded


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param((), "", id="by default"),
        pytest.param(
            ("--set", "admissionPolicy.enabled=false"), "enabled is false", id="switched off"
        ),
        pytest.param(("--set", "watchNamespaces={a}"), "watchNamespaces is set", id="namespaces"),
        pytest.param(("--kube-version", "1.29.3"), "v1.29.3 does not", id="an older cluster"),
    ],
)
def test_the_notes_say_why_nothing_bounds_the_operator(
    arguments: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    """Helm renders notes only with a cluster, so the test renders them as a template."""
    chart = tmp_path / "sluice"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    define = f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}'
    body = 'text: |\n{{ include "notes" . | indent 2 }}\n'
    (chart / "templates" / "notes.yaml").write_text(define + body)
    done = helm("template", "sluice", chart, "--show-only", "templates/notes.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    assert ("created no ValidatingAdmissionPolicy" in done.stdout) is bool(reason)
    assert reason in done.stdout


def test_the_policy_is_about_the_operators_account_and_not_its_key() -> None:
    manifests = objects("everything")
    conditions = {
        condition["name"]: condition["expression"]
        for condition in find_object(manifests, POLICY)["spec"]["matchConditions"]
    }
    account = operator(manifests)["spec"]["serviceAccountName"]
    assert f"'system:serviceaccount:sluice-system:{account}'" in conditions["is-the-operator"]
    assert f"'{environment(manifests)['SLUICE_KEY_SECRET']}'" in conditions["is-not-its-own-key"]


def test_the_policy_is_about_all_that_the_operator_may_write_for_jobs() -> None:
    """But for events, its leases, and the jobs themselves."""
    manifests = objects("defaults")
    rules = find_object(manifests, POLICY)["spec"]["matchConstraints"]["resourceRules"]
    bounded = {
        (group, plural)
        for rule in rules
        for group in rule["apiGroups"]
        for plural in rule["resources"]
    }
    writes = {"create", "patch", "update", "delete"}
    for rule in find_object(manifests, "ClusterRole", "sluice-operator")["rules"]:
        if writes & {*rule["verbs"]} and not {*rule["apiGroups"]} & {
            "sluice.dev",
            "events.k8s.io",
            "coordination.k8s.io",
        }:
            assert {
                (group, plural) for group in rule["apiGroups"] for plural in rule["resources"]
            } <= bounded
