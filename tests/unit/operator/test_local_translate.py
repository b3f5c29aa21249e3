"""A pod's manifest becomes commands for a laptop."""

import sys
from pathlib import Path
from typing import Any

import pytest

from sluice_operator.cluster.local.gpus import assign
from sluice_operator.cluster.local.readiness import url
from sluice_operator.cluster.local.services import named_addresses, pod_ports
from sluice_operator.cluster.local.translate import (
    HostBindings,
    PodError,
    commands,
    expand,
    translate,
)
from sluice_operator.cluster.local.volumes import prepare

PATHS = {"/sluice/model": "/tmp/m", "/sluice/model/lora": "/tmp/l"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/sluice/model", "/tmp/m"),
        ("/sluice/model/qwen", "/tmp/m/qwen"),
        ("/sluice/model/lora/x", "/tmp/l/x"),
        ("--path=/sluice/model/qwen", "--path=/tmp/m/qwen"),
        ("/sluice/model/a:/sluice/model/b", "/tmp/m/a:/tmp/m/b"),
        ('{"path": "/sluice/model/qwen"}', '{"path": "/tmp/m/qwen"}'),
        ("/sluice/model/x.jsonl@[0:10]", "/tmp/m/x.jsonl@[0:10]"),
        ("/sluice/models", "/sluice/models"),
        ("/other/sluice/model", "/other/sluice/model"),
        ("text", "text"),
    ],
)
def test_translate(text: str, expected: str) -> None:
    assert translate(text, PATHS) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)/$(B)", "1/2"),
        ("$(NO)", "$(NO)"),
        ("$$(A)", "$(A)"),
        ("$A ${A}", "$A ${A}"),
    ],
)
def test_expand(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


def make_pod(**container: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "labels": {"role": "x"}},
        "spec": {"containers": [{"name": "c", "command": ["python3", "-c", "pass"], **container}]},
    }


OBJECTS = {
    "Secret/token": {
        "kind": "Secret",
        "stringData": {"token": "plain"},
        "data": {"old": "ZW5jb2RlZA=="},
    },
    "ConfigMap/settings": {"kind": "ConfigMap", "data": {"mode": "fast"}},
}
PLACE = HostBindings(
    {"model": Path("/tmp/m")}, {"http": 20001}, {"SLUICE_BIND": "127.0.0.1"}, OBJECTS
)


def env_of(*entries: dict[str, Any], **container: Any) -> dict[str, str]:
    return commands(make_pod(env=list(entries), **container), PLACE, {})[0].env


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"value": "x"}, "x"),
        ({"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, "127.0.0.1"),
        ({"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, "p"),
        ({"valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['role']"}}}, "x"),
        ({"valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}}, "plain"),
        ({"valueFrom": {"secretKeyRef": {"name": "token", "key": "old"}}}, "encoded"),
        ({"valueFrom": {"configMapKeyRef": {"name": "settings", "key": "mode"}}}, "fast"),
        ({"valueFrom": {"secretKeyRef": {"name": "none", "key": "k", "optional": True}}}, None),
    ],
    ids=str,
)
def test_variables(entry: dict[str, Any], expected: str | None) -> None:
    assert env_of({"name": "V"} | entry).get("V") == expected


def test_what_differs_on_a_laptop_is_overridden_in_place() -> None:
    variables = env_of(
        {"name": "SLUICE_BIND", "value": "0.0.0.0"},
        {"name": "SLUICE_PORT_HTTP", "value": "30000"},
        {"name": "URL", "value": "http://$(SLUICE_BIND):$(SLUICE_PORT_HTTP)"},
    )
    assert variables["URL"] == "http://127.0.0.1:20001"


HF = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "of-a-cluster", "key": "token"}}}


def test_a_secret_of_a_cluster_is_a_variable_of_this_machine() -> None:
    variables = commands(make_pod(env=[HF]), PLACE, {"HF_TOKEN": "mine"})[0].env
    assert variables["HF_TOKEN"] == "mine"


def test_a_secret_that_is_nowhere_is_told_with_what_to_do() -> None:
    with pytest.raises(
        PodError, match="Secret of-a-cluster does not exist in this run; set the variable on this"
    ):
        env_of(HF)


def test_ports_without_a_name_are_left_alone() -> None:
    pod = make_pod(ports=[{"containerPort": 8080}, {"containerPort": 9400, "name": "metrics"}])
    assert list(pod_ports(pod, [], set())) == ["metrics"]


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({}, ""),
        (
            {"readinessProbe": {"httpGet": {"port": "http", "path": "/health"}}},
            "http://127.0.0.1:20001/health",
        ),
    ],
)
def test_where_a_probe_asks(container: dict[str, Any], expected: str) -> None:
    assert url(container, {"http": 20001}) == expected


@pytest.mark.parametrize(
    "probe", [{"exec": {"command": ["true"]}}, {"httpGet": {"port": 8080}}], ids=str
)
def test_a_probe_that_a_laptop_cannot_ask_is_refused(probe: dict[str, Any]) -> None:
    with pytest.raises(PodError, match="readinessProbe"):
        url({"readinessProbe": probe}, {"http": 20001})


def test_env_from() -> None:
    assert env_of(envFrom=[{"configMapRef": {"name": "settings"}, "prefix": "S_"}]) == {
        "S_mode": "fast"
    }


def test_a_secret_that_only_a_cluster_has_leaves_the_variables_of_this_machine() -> None:
    assert env_of(envFrom=[{"secretRef": {"name": "of-a-cluster"}}]) == {}


def test_command_line() -> None:
    mount = {"name": "model", "mountPath": "/sluice/model"}
    env = [{"name": "P", "value": "/sluice/model/x"}]
    command = commands(
        make_pod(volumeMounts=[mount], args=["--m=/sluice/model", "$(P)"], env=env),
        PLACE,
        {"A": "b"},
    )[0]
    assert command.argv == [sys.executable, "-c", "pass", "--m=/tmp/m", "/tmp/m/x"]
    assert command.env == {"A": "b", "P": "/tmp/m/x"}


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (make_pod(command=[]), "container c has no command"),
        (
            {"spec": {"initContainers": [{"restartPolicy": "Always"}], "containers": []}},
            "an initContainer with a restartPolicy needs a cluster",
        ),
        (
            make_pod(volumeMounts=[{"name": "x", "mountPath": "/x"}]),
            "which is no volume of the pod",
        ),
        (
            make_pod(env=[{"name": "V", "valueFrom": {"resourceFieldRef": {}}}]),
            "resourceFieldRef needs a cluster",
        ),
        (
            make_pod(env=[{"name": "V", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]),
            "spec.x needs a cluster",
        ),
        (
            make_pod(
                env=[{"name": "V", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "k"}}}]
            ),
            "Secret hf does not exist in this run",
        ),
        (
            make_pod(
                env=[{"name": "V", "valueFrom": {"secretKeyRef": {"name": "token", "key": "k"}}}]
            ),
            "Secret token has no key k",
        ),
    ],
)
def test_what_a_laptop_cannot_do_is_refused_in_words(pod: dict[str, Any], message: str) -> None:
    with pytest.raises(PodError, match=message):
        commands(pod, PLACE, {})


def with_volumes(*volumes: dict[str, Any], **mount: Any) -> dict[str, Any]:
    pod = make_pod(volumeMounts=[{"name": volumes[0]["name"], "mountPath": "/v", **mount}])
    pod["spec"]["volumes"] = list(volumes)
    return pod


def test_volumes_become_directories(tmp_path: Path) -> None:
    pod = with_volumes(
        {"name": "scratch", "emptyDir": {}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "shared"}},
        {"name": "host", "hostPath": {"path": str(tmp_path)}},
        {"name": "run", "emptyDir": {}},
        subPath="a/b",
    )
    directories = prepare(pod, tmp_path, tmp_path / "pod", {"run": tmp_path / "chosen"}, {})
    assert directories == {
        "scratch": tmp_path / "volumes/scratch",
        "data": tmp_path / "volumes/shared",
        "host": tmp_path,
        "run": tmp_path / "chosen",
    }
    assert (tmp_path / "volumes/scratch/a/b").is_dir()


def test_config_maps_and_secrets_become_files_with_this_machines_paths(tmp_path: Path) -> None:
    objects = {"ConfigMap/c": {"kind": "ConfigMap", "data": {"f.json": '{"path": "/v/x"}'}}}
    pod = with_volumes(
        {"name": "v", "emptyDir": {}}, {"name": "config", "configMap": {"name": "c"}}
    )
    directories = prepare(pod, tmp_path, tmp_path / "pod", {}, objects)
    assert (directories["config"] / "f.json").read_text() == f'{{"path": "{tmp_path}/volumes/v/x"}}'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"hostPath": {"path": "/does/not/exist"}}, "/does/not/exist does not exist"),
        ({"nfs": {"server": "x"}}, "nfs needs a cluster"),
        ({"secret": {"secretName": "x"}}, "Secret x does not exist"),
    ],
)
def test_volumes_that_cannot_be_made(tmp_path: Path, source: dict[str, Any], message: str) -> None:
    with pytest.raises(PodError, match=message):
        prepare(with_volumes({"name": "v", **source}), tmp_path, tmp_path / "pod", {}, {})


@pytest.mark.parametrize(
    ("count", "gpus", "taken", "expected"),
    [
        (1, ["0", "1"], [], ["0"]),
        (1, ["0", "1"], ["0"], ["1"]),
        (2, ["0", "1"], ["0"], "2 GPUs requested, 1 of 2 free"),
        (1, [], [], "1 GPUs requested, 0 of 0 free"),
        (1, ["0", "0"], ["0"], ["0"]),
    ],
    ids=str,
)
def test_gpus_are_handed_out(
    count: int, gpus: list[str], taken: list[str], expected: list[str] | str
) -> None:
    assert assign(count, gpus, taken) == expected


def test_a_name_that_only_a_clusters_dns_knows_is_an_address_of_this_machine_to_all_pods() -> None:
    ports: dict[str, int] = {"svc": 20001}
    address = "demo-rollout-0-1-0.demo-engines:29500"
    pods = [
        make_pod(args=["--dist-init-addr", address, "--node-rank", str(rank)]) for rank in range(2)
    ]
    for pod in pods:
        pod["spec"]["subdomain"] = "demo-engines"
    addresses_by_pod = [named_addresses(pod, ports, {20001}) for pod in pods]
    assert addresses_by_pod[0] == addresses_by_pod[1] == {address: f"127.0.0.1:{ports[address]}"}
    assert ports[address] != 20001
    place = HostBindings({"m": Path("/tmp/m")}, {}, {}, {}, addresses_by_pod[0])
    assert commands(pods[1], place, {})[0].argv[-4:] == [
        "--dist-init-addr",
        addresses_by_pod[0][address],
        "--node-rank",
        "1",
    ]
    assert named_addresses(make_pod(args=[address]), ports, set()) == {}, (
        "a pod without names of its own"
    )
