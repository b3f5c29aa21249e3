"""Pods of episodes: when they come and go, what they may reach."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sluice.api import RLJob
from sluice_operator.plan import KubeObject, Observed, Plan, plan
from sluice_operator.plan.decide.episodes import EpisodePod, EpisodeSlot
from sluice_operator.plan.facts.model import Gang, Images
from sluice_operator.plan.manifests.episodes import episode_pod, episode_policies
from sluice_operator.plan.manifests.network import network_policy
from sluice_operator.plan.manifests.optional_objects import extra_objects
from sluice_operator.plan.manifests.pods import pod as gang_pod
from tests.unit.operator.world import START, make_job, make_pod

IMAGE = {"command": ["agent"], "image": "me/agent:1", "pods": 2}


def agent_job(environment: dict[str, Any] | None = None, **spec: Any) -> RLJob:
    return make_job(
        rollout={"gpusPerReplica": 0, "environment": IMAGE | (environment or {})}, **spec
    )


def engine(
    replica: int = 0, attempt: int = 1, address: str = "10.0.0.7", **fields: Any
) -> KubeObject:
    return make_pod("rollout", replica=replica, attempt=attempt, podIP=address, **fields)


def episode(index: int, number: int = 1, **fields: Any) -> KubeObject:
    pod = make_pod("episode", index=index, **fields)
    pod["metadata"]["labels"]["sluice.dev/number"] = str(number)
    pod["metadata"]["name"] += f"-{number}"
    return pod


def planned(job: RLJob, *pods: KubeObject, namespace: str | None = "sluice-system") -> Plan:
    return plan(job, Observed(pods, operator_namespace=namespace), START)


def created(decided: Plan) -> list[str]:
    names = [item["metadata"]["name"] for item in decided.create if item["kind"] == "Pod"]
    return [name for name in names if "-episode-" in name]


def deleted(decided: Plan) -> list[str]:
    return [item.name for item in decided.delete if "-episode-" in item.name]


def leaving(pod: KubeObject) -> KubeObject:
    at = (START + timedelta(seconds=5)).isoformat().replace("+00:00", "Z")
    return replace_metadata(pod, deletionTimestamp=at)


def replace_metadata(pod: KubeObject, **fields: Any) -> KubeObject:
    return {**pod, "metadata": pod["metadata"] | fields}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([], [], id="no engine yet"),
        pytest.param([engine(address="")], [], id="an engine without an address"),
        pytest.param([engine(phase="Pending")], [], id="an engine that starts"),
        pytest.param([leaving(engine())], [], id="an engine that ends"),
        pytest.param([engine()], ["0-1-0-1", "0-1-1-1"], id="a warm pool"),
        pytest.param([engine(), episode(0), episode(1)], [], id="enough"),
        pytest.param([engine(), episode(0, phase="Pending")], ["0-1-1-1"], id="one starts"),
        pytest.param(
            [engine(), episode(0, 6, phase="Succeeded"), episode(1)],
            ["0-1-0-7"],
            id="one has ended",
        ),
        pytest.param([engine(), leaving(episode(0, 6)), episode(1)], ["0-1-0-7"], id="one ends"),
        pytest.param(
            [engine(), episode(0, 6, ends={"episode": 137}), episode(1)],
            ["0-1-0-7"],
            id="a program was killed",
        ),
        pytest.param(
            [engine(attempt=3), engine(1, 2, "10.0.0.8")],
            ["0-3-0-1", "0-3-1-1", "1-2-0-1", "1-2-1-1"],
            id="each engine has its own",
        ),
    ],
)
def test_each_place_has_a_pod(pods: list[KubeObject], expected: list[str]) -> None:
    assert created(planned(agent_job(), *pods)) == [f"demo-episode-{name}" for name in expected]


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([engine(), episode(0), episode(1)], [], id="at work"),
        pytest.param([engine(), episode(0, phase="Succeeded")], [0], id="ended"),
        pytest.param([engine(), episode(0, phase="Failed")], [0], id="failed"),
        pytest.param([engine(attempt=2), episode(0), episode(1)], [0, 1], id="their engine is new"),
        pytest.param([episode(0), episode(1)], [0, 1], id="their engine is gone"),
        pytest.param([engine(), episode(0), episode(1), episode(2)], [2], id="too many"),
    ],
)
def test_pods_that_are_over_go(pods: list[KubeObject], expected: list[int]) -> None:
    names = [f"demo-episode-0-1-{index}-1" for index in expected]
    assert deleted(planned(agent_job(), *pods)) == names


@pytest.mark.parametrize(
    ("job", "namespace"),
    [
        pytest.param(agent_job(), None, id="on a laptop"),
        pytest.param(agent_job(suspend=True), "sluice-system", id="suspended"),
        pytest.param(
            make_job(rollout={"environment": {"command": ["./agent"]}}),
            "sluice-system",
            id="no image",
        ),
    ],
)
def test_a_job_without_episode_pods(job: RLJob, namespace: str | None) -> None:
    decided = planned(job, engine(), episode(0), namespace=namespace)
    assert created(decided) == []
    assert "demo-episode-0-1-0-1" in deleted(decided)


def test_episodes_are_no_gang() -> None:
    """Episode pods do not count for a role, and a failed one does not fail the job."""
    without = planned(agent_job(), engine()).status
    assert planned(agent_job(), engine(), episode(0, phase="Failed")).status == without


def test_a_pod_that_cannot_start_is_told_by_the_job() -> None:
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    stuck = episode(0, phase="Pending", containerStatuses=[{"name": "episode"} | waiting])
    condition = planned(agent_job(), engine(), stuck).status.condition("Running")
    assert condition is not None
    assert "demo-episode-0-1-0-1 (episode): ImagePullBackOff: no such image" in condition.message


def test_episodes_without_a_place_are_told_where_none_runs() -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: no CPU"}
    waiting = episode(0, phase="Pending", conditions=[unschedulable])
    alone = planned(agent_job(), engine(), waiting).status.condition("Running")
    beside = planned(agent_job(), engine(), waiting, episode(1)).status.condition("Running")
    assert alone is not None
    assert "demo-episode-0-1-0-1: Unschedulable: 0/3 nodes" in alone.message
    assert beside is not None
    assert "Unschedulable" not in beside.message


def pod_of(**environment: Any) -> KubeObject:
    turn = EpisodePod(EpisodeSlot("episode", 0, 1, 0, "10.0.0.7"), 4)
    return episode_pod(agent_job(environment), turn, Images())


def test_the_program_gets_nothing_of_the_job() -> None:
    spec = pod_of(command=["agent", "--fast"], env={"MODE": "math"})["spec"]
    program, sidecar = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert program["args"] == ["agent", "--fast"]
    assert not any("valueFrom" in variable for variable in program["env"])
    env = {variable["name"]: variable["value"] for variable in program["env"]}
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:7703/v1"
    assert (env["MODE"], env["SLUICE_MODEL"]) == ("math", "tiny")
    assert "10.0.0.7" not in str(program)
    assert {"name": "SLUICE_WORKER", "value": "http://10.0.0.7:7702"} in sidecar["env"]


def test_the_template_is_merged_and_identity_is_not() -> None:
    program = {"name": "episode", "resources": {"limits": {"memory": "2Gi"}}}
    template = {
        "metadata": {"labels": {"team": "a", "sluice.dev/role": "trainer"}},
        "spec": {"runtimeClassName": "gvisor", "restartPolicy": "Always", "containers": [program]},
    }
    pod = pod_of(template=template)
    assert pod["spec"]["runtimeClassName"] == "gvisor"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": "2Gi"}
    labels = pod["metadata"]["labels"]
    assert (labels["team"], labels["sluice.dev/role"]) == ("a", "episode")


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    pod = episode_pod(
        agent_job(), EpisodePod(EpisodeSlot("episode", 0, 1, 0, "fd00::7"), 1), Images()
    )
    env = pod["spec"]["containers"][1]["env"]
    assert {"name": "SLUICE_WORKER", "value": "http://[fd00::7]:7702"} in env


def test_episodes_reach_their_gateway_alone() -> None:
    (policy,) = episode_policies(agent_job())
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy["spec"]
    (gateway,) = policy["spec"]["egress"]
    assert [item["port"] for item in gateway["ports"]] == [7702]
    members, episodes, *_ = (network_policy(agent_job(), None) or {})["spec"]["ingress"]
    selector = members["from"][0]["podSelector"]
    assert selector["matchExpressions"] == [
        {"key": "sluice.dev/role", "operator": "NotIn", "values": ["episode", "verifier"]}
    ]
    assert [item["port"] for item in episodes["ports"]] == [7702]


def test_more_of_the_network_can_be_allowed() -> None:
    world = {"ipBlock": {"cidr": "0.0.0.0/0"}}
    (policy,) = episode_policies(agent_job({"egressTo": [world]}))
    assert policy["spec"]["egress"][1] == {"to": [world]}


def test_the_policy_comes_and_goes_with_the_environment() -> None:
    observed = Observed(operator_namespace="sluice-system")
    names = [
        extra_object["metadata"]["name"] for extra_object in extra_objects(agent_job(), observed)
    ]
    assert "demo-episodes" in names
    off = agent_job(networkPolicy={"enabled": False})
    assert "demo-episodes" not in [e["metadata"]["name"] for e in extra_objects(off, observed)]


def test_the_worker_is_told_of_pods() -> None:
    pod = gang_pod(agent_job(), Gang("rollout", 0, 1), 1, 0, "rendezvous:7700", Images())
    worker = next(
        container for container in pod["spec"]["containers"] if container["name"] == "worker"
    )
    env = {variable["name"]: variable for variable in worker["env"]}
    assert env["SLUICE_EPISODES"]["value"] == "pods"
    assert env["SLUICE_PORT_GATEWAY"]["value"] == "7702"
    secret = env["SLUICE_EPISODE_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret["name"] == "demo-episode-token-1234"
    engine_container = next(
        container for container in pod["spec"]["containers"] if container["name"] == "engine"
    )
    assert "SLUICE_EPISODE_TOKEN" not in str(engine_container)


VERIFIER = {"verifier": {"command": ["judge"], "pods": 1}}


def verifier(index: int, number: int = 1, **fields: Any) -> KubeObject:
    pod = make_pod("verifier", index=index, **fields)
    pod["metadata"]["labels"]["sluice.dev/number"] = str(number)
    pod["metadata"]["name"] += f"-{number}"
    return pod


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([episode(0), episode(1)], ["demo-verifier-0-1-0-1"], id="a pool of its own"),
        pytest.param([episode(0), episode(1), verifier(0)], [], id="enough"),
        pytest.param(
            [episode(0), episode(1), verifier(0, 3, phase="Succeeded")],
            ["demo-verifier-0-1-0-4"],
            id="one has ended",
        ),
    ],
)
def test_a_verifier_has_places_of_its_own(pods: list[KubeObject], expected: list[str]) -> None:
    decided = planned(agent_job(VERIFIER), engine(), *pods)
    names = [item["metadata"]["name"] for item in decided.create if item["kind"] == "Pod"]
    assert [name for name in names if "-verifier-" in name or "-episode-" in name] == expected


def test_without_a_verifier_its_pods_go() -> None:
    gone = planned(agent_job(), engine(), episode(0), episode(1), verifier(0)).delete
    assert "demo-verifier-0-1-0-1" in [item.name for item in gone]


def test_a_verifier_without_a_place_is_told_though_episodes_run() -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: no CPU"}
    waiting = verifier(0, phase="Pending", conditions=[unschedulable])
    status = planned(agent_job(VERIFIER), engine(), episode(0), episode(1), waiting).status
    condition = status.condition("Running")
    assert condition is not None
    assert "demo-verifier-0-1-0-1: Unschedulable: 0/3 nodes" in condition.message


def verifier_pod(**fields: Any) -> KubeObject:
    job = agent_job({"verifier": {"command": ["judge", "--strict"], **fields}, "env": {"A": "b"}})
    return episode_pod(job, EpisodePod(EpisodeSlot("verifier", 0, 1, 0, "10.0.0.7"), 4), Images())


def test_a_verifier_has_no_model_and_nothing_of_the_program() -> None:
    program, sidecar = verifier_pod()["spec"]["containers"]
    env = {variable["name"]: variable["value"] for variable in program["env"]}
    assert env == {
        "SLUICE_EPISODE": "/sluice/episode",
        "SLUICE_ARTIFACTS": "/sluice/episode/artifacts",
    }
    assert (program["name"], program["args"]) == ("verifier", ["judge", "--strict"])
    assert {"name": "SLUICE_ROLE", "value": "verifier"} in sidecar["env"]


@pytest.mark.parametrize(
    ("fields", "image"),
    [
        pytest.param({}, "me/agent:1", id="the program's"),
        pytest.param({"image": "me/judge:2"}, "me/judge:2", id="its own"),
    ],
)
def test_a_verifiers_image(fields: dict[str, Any], image: str) -> None:
    assert verifier_pod(**fields)["spec"]["containers"][0]["image"] == image


def test_a_verifiers_template_is_its_own() -> None:
    limits = {"name": "verifier", "resources": {"limits": {"memory": "4Gi"}}}
    pod = verifier_pod(template={"spec": {"containers": [limits]}})
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": "4Gi"}
    assert pod_of()["spec"]["containers"][0]["resources"]["limits"] == {"memory": "8Gi"}


def test_a_program_that_asks_for_more_memory_gets_it_as_its_limit() -> None:
    large = {"name": "verifier", "resources": {"requests": {"memory": "20Gi"}}}
    program, sidecar = verifier_pod(template={"spec": {"containers": [large]}})["spec"][
        "containers"
    ]
    assert program["resources"]["limits"] == {"memory": "20Gi"}
    assert sidecar["resources"]["limits"] == {"memory": "1Gi"}


def test_a_verifier_reaches_its_gateway_alone_whatever_the_program_may() -> None:
    world = {"ipBlock": {"cidr": "0.0.0.0/0"}}
    policies = episode_policies(agent_job(VERIFIER | {"egressTo": [world]}))
    by_role = {
        policy["spec"]["podSelector"]["matchLabels"]["sluice.dev/role"]: policy["spec"]
        for policy in policies
    }
    assert {"to": [world]} in by_role["episode"]["egress"]
    (gateway,) = by_role["verifier"]["egress"]
    assert [item["port"] for item in gateway["ports"]] == [7702]
