"""Budget, network policy and groups: what a job owns and could run without."""

from typing import Any

import pytest

from sluice_operator.plan import Deletion, Observed
from sluice_operator.plan.facts import podstate
from sluice_operator.plan.manifests.network import network_policy
from sluice_operator.plan.manifests.optional_objects import (
    covers,
    disruption_budget,
    extra_objects,
    missing_extras,
)
from tests.unit.operator.world import World, make_job, settled

BUDGET, POLICY = ("PodDisruptionBudget", "demo-rollout"), ("NetworkPolicy", "demo-ingress")


@pytest.mark.parametrize(
    ("spec", "replicas", "expected"),
    [
        ({}, 2, 1),
        ({}, 64, 1),
        ({"rollout": {"nodesPerReplica": 4}}, 2, 4),
        ({}, 1, None),
        ({"podDisruptionBudget": {"enabled": False}}, 2, None),
    ],
)
def test_one_engine_stays_while_machines_are_drained(
    spec: Any, replicas: int, expected: int | None
) -> None:
    budget = disruption_budget(make_job(**spec), replicas)
    assert (budget["spec"]["minAvailable"] if budget else None) == expected
    if budget:
        assert budget["spec"]["selector"]["matchLabels"] == {
            "sluice.dev/job-name": "demo",
            "sluice.dev/role": "rollout",
        }
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_network_lets_in_the_job_the_operator_and_scrapes() -> None:
    policy = network_policy(make_job(), "sluice-system")
    assert policy is not None
    members, operator, scrape = policy["spec"]["ingress"]
    assert members == {"from": [{"podSelector": {"matchLabels": {"sluice.dev/job-name": "demo"}}}]}
    assert operator["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "sluice-system"
    }
    assert operator["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "sluice"}
    assert [port["port"] for port in operator["ports"]] == [7700, 7701]
    assert scrape == {
        "from": [{"namespaceSelector": {}}],
        "ports": [{"protocol": "TCP", "port": 9400}],
    }
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_who_may_scrape_can_be_narrowed() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"team": "sre"}}}
    policy = network_policy(make_job(networkPolicy={"metricsFrom": [peer]}), "sluice-system")
    assert policy is not None
    assert policy["spec"]["ingress"][-1]["from"] == [peer]


def test_without_an_operator_in_the_cluster_nobody_else_gets_in() -> None:
    policy = network_policy(make_job(), None)
    assert policy is not None
    assert len(policy["spec"]["ingress"]) == 2


def test_a_job_may_do_without_a_network_policy() -> None:
    assert network_policy(make_job(networkPolicy={"enabled": False}), "sluice-system") is None


def test_kinds_that_the_cluster_does_not_know_are_left_out() -> None:
    job = make_job(rollout={"replicas": 2})
    assert {extra_object["kind"] for extra_object in extra_objects(job, Observed())} == {
        "PodDisruptionBudget",
        "NetworkPolicy",
    }
    observed = Observed(absent_kinds=frozenset({"PodDisruptionBudget"}))
    assert {missing_extra["kind"] for missing_extra in missing_extras(job, observed)} == {
        "NetworkPolicy"
    }


@pytest.mark.parametrize(
    ("live", "desired", "expected"),
    [
        ({"a": 1, "default": True}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}, True),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({}, {"a": 1}, False),
        (None, {"a": 1}, False),
    ],
    ids=str,
)
def test_an_api_servers_defaults_are_no_difference(live: Any, desired: Any, expected: bool) -> None:
    assert covers(live, desired) is expected


def test_the_budget_goes_with_the_second_engine_and_comes_with_it() -> None:
    world = settled(rollout={"replicas": 2})
    assert BUDGET in world.objects
    world.job = make_job(rollout={"replicas": 1})
    world.settle()
    assert BUDGET not in world.objects
    world.job = make_job(rollout={"replicas": 2})
    world.settle()
    assert BUDGET in world.objects


def test_a_changed_policy_is_written_and_a_disabled_one_deleted() -> None:
    world = settled()
    peer = {"namespaceSelector": {"matchLabels": {"team": "sre"}}}
    world.job = make_job(networkPolicy={"metricsFrom": [peer]})
    assert "NetworkPolicy" in [item["kind"] for item in world.step().create]
    assert world.step().create == ()
    world.job = make_job(networkPolicy={"enabled": False})
    assert world.step().delete == (Deletion(*POLICY),)
    assert POLICY not in world.objects


WHOLE = "demo-group-1234-1"
VOLCANO = {"podGroupPolicy": {"volcano": {}}, "trainer": {"nodes": 2}}


def groups(world: World) -> list[str]:
    return sorted(name for kind, name in world.objects if kind == "PodGroup")


def test_the_jobs_group_stays_and_each_attempt_of_a_further_engine_has_its_own() -> None:
    world = settled(**VOLCANO, rollout={"replicas": 2})
    assert groups(world) == [WHOLE, "demo-rollout-1-1"]
    assert world.objects["PodGroup", WHOLE]["spec"]["minMember"] == 3
    for pod in ("demo-trainer-0-1-1", "demo-rollout-0-1-0", "demo-rollout-1-1-0"):
        world.end(pod, 1)
    world.step()
    assert groups(world) == [WHOLE, "demo-rollout-1-1"], "its pods are still there"
    world.settle()
    assert groups(world) == [WHOLE], "the next attempt waits for its back-off"
    world.advance(60)
    world.settle()
    assert groups(world) == [WHOLE, "demo-rollout-1-2"]
    assert {podstate.group(world.pods[name]) for name in world.names("trainer")} == {WHOLE}


def test_groups_of_a_suspended_job_go_with_its_pods() -> None:
    world = settled(**VOLCANO)
    world.job = make_job(**VOLCANO, suspend=True)
    world.settle()
    assert groups(world) == []
    assert world.names() == []
    world.job = make_job(**VOLCANO)
    world.settle()
    assert groups(world) == ["demo-group-1234-2"]


def test_a_group_is_made_before_its_pods_and_kept_where_they_could_not_be_made() -> None:
    world = World(make_job(**VOLCANO))
    world.step()
    decision = world.plan()
    order = [(item["kind"], item["metadata"]["name"]) for item in decision.create]
    assert order.index(("PodGroup", WHOLE)) < order.index(("Pod", "demo-trainer-0-1-0"))
    world.step(create=order.index(("PodGroup", WHOLE)) + 1)
    again = world.plan()
    assert again.delete == ()
    assert ("PodGroup", WHOLE) not in [
        (item["kind"], item["metadata"]["name"]) for item in again.create
    ]
