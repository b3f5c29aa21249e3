"""Levels of a cluster's topology: for the whole job, and for the pods of one gang."""

from typing import Any

import pytest
from pydantic import ValidationError

from sluice_operator.plan.facts.model import Gang, Images, KubeObject
from sluice_operator.plan.manifests.placement import ZONE
from sluice_operator.plan.manifests.pods import pod
from tests.unit.operator.world import make_job

RACK, BLOCK = "cloud.example.com/rack", "cloud.example.com/block"
REQUIRED = "kueue.x-k8s.io/podset-required-topology"
PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"
QUEUE = {"podGroupPolicy": {"kueue": {"queueName": "q"}}}


def render(role: Any, size: int, **spec: Any) -> KubeObject:
    return pod(make_job(**spec), Gang(role, 1, size), 1, 0, "10.0.0.1:7700", Images())


def affinity(manifest: KubeObject) -> dict[str, Any]:
    affinity: dict[str, Any] = manifest["spec"]["affinity"]["podAffinity"]
    return affinity


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_job_s_level_takes_the_place_of_the_zone(role: str) -> None:
    (term,) = affinity(render(role, 1, topology={"required": BLOCK}))[
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == BLOCK
    assert term["labelSelector"]["matchLabels"] == {"sluice.dev/job-name": "demo"}
    wish = affinity(render(role, 1, topology={"preferred": BLOCK}))
    assert [item["podAffinityTerm"]["topologyKey"] for item in wish.popitem()[1]] == [BLOCK]
    assert not wish


def test_a_gang_s_level_is_about_its_own_pods_beside_that_of_the_job() -> None:
    rules = affinity(
        render("rollout", 2, rollout={"nodesPerReplica": 2, "topology": {"required": RACK}})
    )
    (term,) = rules["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == RACK
    assert term["labelSelector"]["matchLabels"] == {
        "sluice.dev/job-name": "demo",
        "sluice.dev/role": "rollout",
        "sluice.dev/replica": "1",
    }
    (wish,) = rules["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["podAffinityTerm"]["topologyKey"] == ZONE


def test_one_pod_is_always_together() -> None:
    assert list(affinity(render("trainer", 1, trainer={"topology": {"required": RACK}}))) == [
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({"topology": {"required": BLOCK}}, {REQUIRED: BLOCK}, id="of the job"),
        pytest.param({"topology": {"preferred": BLOCK}}, {PREFERRED: BLOCK}, id="a wish"),
        pytest.param(
            {
                "topology": {"preferred": BLOCK},
                "trainer": {"nodes": 2, "topology": {"required": RACK}},
            },
            {REQUIRED: RACK},
            id="the gang's own before the job's",
        ),
        pytest.param({}, {}, id="nothing said"),
    ],
)
def test_in_a_queue_of_kueue_the_level_is_an_annotation(
    spec: dict[str, Any], expected: dict[str, str]
) -> None:
    manifest = render("trainer", 2, **QUEUE, **spec)
    annotations = manifest["metadata"]["annotations"]
    assert {
        key: annotations[key] for key in (REQUIRED, PREFERRED) if key in annotations
    } == expected
    keys = [
        term["podAffinityTerm"]["topologyKey"]
        for terms in affinity(manifest).values()
        for term in terms
    ]
    assert keys == [ZONE], "the level itself is Kueue's matter alone"


@pytest.mark.parametrize("role", ["buffer", "rendezvous"])
def test_services_may_be_anywhere(role: str) -> None:
    manifest = render(role, 1, topology={"required": BLOCK})
    assert "affinity" not in manifest["spec"]
    assert REQUIRED not in manifest["metadata"].get("annotations", {})


@pytest.mark.parametrize(
    "topology", [{}, {"required": RACK, "preferred": BLOCK}, {"required": "a rack"}], ids=str
)
def test_exactly_one_level_by_a_label_of_nodes(topology: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"topology|exactly one"):
        make_job(topology=topology)
