"""The chart's manifests: golden files for three sets of values, and rules that hold in each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helm import (
    CHART,
    VALUES,
    Object,
    environment,
    find_object,
    helm,
    load,
    objects,
    template,
)
from tests.tools import ROOT

GOLDEN = Path(__file__).parent / "golden"
ALL = sorted(file.stem for file in VALUES.glob("*.yaml"))
# Templates of generated files, which other tests compare.
LARGE = tuple(f"sluice/templates/{name}.yaml" for name in ("crd", "dashboards", "prometheusrule"))


@pytest.mark.parametrize("values", ALL)
def test_rendered_chart(values: str) -> None:
    documents = template(values).split("---\n")
    small = [document for document in documents if not any(name in document for name in LARGE)]
    rendered = "---\n".join(small)
    path = GOLDEN / f"{values}.yaml"
    if os.environ.get("SLUICE_UPDATE_GOLDEN"):
        path.write_text(rendered)
    assert rendered == path.read_text(), "SLUICE_UPDATE_GOLDEN=1 writes the golden files anew"


@pytest.mark.parametrize("values", ALL)
def test_helm_finds_nothing_to_complain_of(values: str) -> None:
    done = helm("lint", "--strict", CHART, "--values", VALUES / f"{values}.yaml")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("plural", ["rljobs", "rlenginepools"])
def test_a_crd_is_the_generated_one_and_stays_when_the_chart_goes(plural: str) -> None:
    source = (ROOT / "crds" / f"sluice.dev_{plural}.yaml").read_text()
    assert (CHART / "files" / f"{plural}.sluice.dev.yaml").read_text() == source, "make crds"
    crd = find_object(objects(), "CustomResourceDefinition", f"{plural}.sluice.dev")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd["metadata"].pop("labels")["app.kubernetes.io/managed-by"] == "Helm"
    assert crd == load(source)


def test_a_server_that_does_not_know_selectable_fields_gets_none() -> None:
    """The API refuses unknown fields of a CRD if the request is strict, as Helm's is."""
    new, old = (
        find_object(
            objects("defaults", "--kube-version", version),
            "CustomResourceDefinition",
            "rljobs.sluice.dev",
        )["spec"]
        for version in ("1.30.0", "1.29.9")
    )
    assert new["versions"][0].pop("selectableFields") == [{"jsonPath": ".status.state"}]
    assert old == new


def test_the_crds_may_be_left_to_others_or_go_with_the_chart() -> None:
    crds = [
        manifest
        for manifest in objects("everything")
        if manifest["kind"] == "CustomResourceDefinition"
    ]
    assert len(crds) == 2
    for crd in crds:
        assert "helm.sh/resource-policy" not in crd["metadata"].get("annotations", {})
    assert not [
        manifest
        for manifest in objects("namespaces")
        if manifest["kind"] == "CustomResourceDefinition"
    ]


def test_with_watched_namespaces_nothing_is_of_the_cluster() -> None:
    manifests = objects("namespaces", "--set", "crds.install=false")
    assert {manifest["metadata"].get("namespace") for manifest in manifests} == {
        "sluice-system",
        "team-a",
        "team-b",
    }
    assert not [manifest for manifest in manifests if manifest["kind"].startswith("Cluster")]
    assert environment(manifests)["SLUICE_WATCH_NAMESPACES"] == "team-a,team-b"


def test_both_modes_give_the_same_rights() -> None:
    everywhere = find_object(objects(), "ClusterRole", "sluice-operator")["rules"]
    for namespace in ("team-a", "team-b"):
        (role,) = [
            manifest
            for manifest in objects("namespaces")
            if (manifest["kind"], manifest["metadata"]["namespace"]) == ("Role", namespace)
        ]
        assert role["rules"] == everywhere


@pytest.mark.parametrize("values", ALL)
def test_no_right_to_read_secrets_beyond_the_operators_own(values: str) -> None:
    for role in [
        manifest for manifest in objects(values) if manifest["kind"] in ("Role", "ClusterRole")
    ]:
        for rule in role["rules"]:
            if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
                assert role["metadata"]["name"].endswith("-self")
                assert len(rule["resourceNames"]) == 1
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
            assert not {"pods/exec", "pods/attach", "pods/portforward", "serviceaccounts/token"} & {
                *rule["resources"]
            }


@pytest.mark.parametrize("values", ["defaults", "namespaces"])
def test_the_operator_meets_the_restricted_pod_security_standard(values: str) -> None:
    manifests = objects(values)
    for pod in (
        find_object(manifests, "Deployment")["spec"]["template"]["spec"],
        find_object(manifests, "Pod")["spec"],
    ):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_digest_wins_over_a_tag_and_a_mirror_over_registries() -> None:
    manifests = objects("everything")
    (container,) = find_object(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    mirror = "mirror.example:5000/cache"
    assert (
        container["image"] == f"{mirror}/sluice-dev/sluice-operator@sha256:{'0123456789abcdef' * 4}"
    )
    images = environment(manifests)
    assert images["SLUICE_IMAGE_TRAINER"] == f"{mirror}/mine/trainer:v1"
    assert images["SLUICE_IMAGE_ENGINE"].startswith(f"{mirror}/lmsysorg/sglang:v")


def test_a_spread_constraint_without_a_selector_gets_the_operators() -> None:
    pod = find_object(objects(), "Deployment")["spec"]["template"]
    (constraint,) = pod["spec"]["topologySpreadConstraints"]
    assert constraint["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (own,) = find_object(objects("everything"), "Deployment")["spec"]["template"]["spec"][
        "topologySpreadConstraints"
    ]
    assert "own" in own["labelSelector"]["matchLabels"]


def test_names_with_their_suffixes_fit() -> None:
    long = "a" * 53  # the longest name of a release
    named = [
        manifest
        for manifest in load_all(template(release=long))
        if "name" in manifest.get("metadata", {})
    ]
    assert max(len(manifest["metadata"]["name"]) for manifest in named) <= 63


def test_roles_of_users_join_the_clusters_own() -> None:
    roles = {
        manifest["metadata"]["name"]: manifest
        for manifest in objects()
        if manifest["kind"] == "ClusterRole"
    }
    for name, joined in (("viewer", "view"), ("editor", "edit"), ("admin", "admin")):
        label = f"rbac.authorization.k8s.io/aggregate-to-{joined}"
        assert roles[f"sluice-{name}"]["metadata"]["labels"][label] == "true"


def test_a_service_monitor_without_a_service_is_refused() -> None:
    settings = "metrics.serviceMonitor.enabled=true,metrics.service.enabled=false"
    done = helm("template", "sluice", CHART, "--set", settings)
    assert "metrics.serviceMonitor.enabled needs metrics.service.enabled" in done.stderr


def load_all(text: str) -> list[Object]:
    return [load(document) for document in text.split("---\n") if document.strip()]
