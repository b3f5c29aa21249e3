"""Rendered manifests, against golden files (golden.py)."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api import RLJob
from sluice_operator.plan import KubeObject, render_all
from sluice_operator.plan.facts.model import Gang, Images
from sluice_operator.plan.manifests.pods import pod
from tests.unit.operator import golden
from tests.unit.operator.world import make_job

CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}
BASE = "laptop"
JOBS = {
    "openenv": make_job(
        rollout={
            "gpusPerReplica": 1,
            "environment": {"openenv": {"image": "ghcr.io/me/wordle:1", "port": 8080}},
        },
    ),
    "laptop": make_job(model={"path": "/home/me/tiny", "init": "random"}),
    "cluster": make_job(
        model={"path": "qwen3-4b", "volume": CLAIM, "trustRemoteCode": True},
        data={"prompts": [{"path": "gsm8k.parquet"}], "volume": CLAIM},
        trainer={
            "nodes": 2,
            "gpusPerNode": 8,
            "template": {"spec": {"nodeSelector": {"gpu": "h200"}}},
        },
        rollout={"gpusPerReplica": 4, "replicas": 2, "engineArgs": {"memFractionStatic": 0.8}},
        buffer={"memory": "8Gi", "storage": {"size": "100Gi", "storageClassName": "fast"}},
        checkpoint={"volume": {"persistentVolumeClaim": {"claimName": "checkpoints"}}},
    ),
    "tls": make_job(rollout={"replicas": 1, "gpusPerReplica": 0}, tls={"enabled": True}),
    "kueue": make_job(
        trainer={"nodes": 2, "gpusPerNode": 8},
        rollout={"gpusPerReplica": 1, "replicas": 2},
        podGroupPolicy={"kueue": {"queueName": "team-a", "priorityClass": "high"}},
        secrets={
            "huggingFace": {"name": "hf", "key": "token"},
            "wandb": {"name": "wandb", "key": "api-key"},
        },
    ),
    "volcano": make_job(
        trainer={"nodes": 2, "gpusPerNode": 8},
        rollout={"gpusPerReplica": 1, "replicas": 2},
        podGroupPolicy={"volcano": {"queue": "team-a", "priorityClassName": "high"}},
    ),
    "native": make_job(
        trainer={"nodes": 2, "gpusPerNode": 8},
        rollout={"gpusPerReplica": 1, "replicas": 3, "minReplicas": 2},
        podGroupPolicy={"native": {}},
    ),
    "rows": make_job(
        data={
            "prompts": [
                {"source": {"function": "tasks.additions", "args": {"digits": 2}, "rows": 1000}}
            ]
        },
        rollout={"gpusPerReplica": 0},
        tls={"enabled": True},
        secrets={"huggingFace": {"name": "hf", "key": "token"}},
    ),
    "uris": make_job(
        model={"path": "hf://org/name@v1"},
        data={"prompts": [{"path": "s3://bucket/rows.jsonl@[0:1000]"}]},
        downloads={
            "volume": {"persistentVolumeClaim": {"claimName": "models"}},
            "secretRef": {"name": "bucket"},
        },
        rollout={"gpusPerReplica": 1},
    ),
    "colocated": make_job(
        trainer={"nodes": 2, "gpusPerNode": 8, "colocate": True},
        rollout={"gpusPerReplica": 4},
        checkpoint={"volume": {"persistentVolumeClaim": {"claimName": "checkpoints"}}},
    ),
    "pool": make_job(
        trainer={"gpusPerNode": 8, "lora": {"rank": 16}},
        rollout={"pool": "shared", "poolWeight": 2, "replicas": 2},
        weightSync={"lora": "adapter", "pauseMode": "versions"},
        podGroupPolicy={"kueue": {"queueName": "team-a"}},
        kernelCache={"volume": {"hostPath": {"path": "/cache"}}},
    ),
    "wide-engine": make_job(
        trainer={"gpusPerNode": 8},
        rollout={"gpusPerReplica": 8, "nodesPerReplica": 2},
        weightSync={"transport": "disk"},
        checkpoint={"volume": {"hostPath": {"path": "/mnt/shared"}}},
        podTemplateOverrides=[
            {
                "roles": ["rollout", "trainer"],
                "template": {"spec": {"tolerations": [{"operator": "Exists"}]}},
            }
        ],
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_rendered_manifests(name: str) -> None:
    objects = render_all(JOBS[name])
    if name == BASE:
        golden.assert_golden(f"{name}.yaml", golden.to_yaml(*objects))
    else:
        base = render_all(JOBS[BASE])
        golden.assert_golden(f"{name}.diff", golden.differences(objects, BASE, base))


def render(job: RLJob, role: str, index: int = 0, size: int = 1) -> KubeObject:
    return pod(job, Gang(role, 0, size), 3, index, "10.0.0.1:7700", Images())  # type: ignore[arg-type]


def containers(body: KubeObject) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in body["spec"]["containers"]}


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_a_template_changes_one_container_and_leaves_the_other() -> None:
    patch = {"name": "worker", "env": [{"name": "DEBUG", "value": "1"}], "image": "mine"}
    template = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {"containers": [patch], "hostNetwork": True},
    }
    rendered = render(make_job(rollout={"template": template}), "rollout")
    assert rendered["spec"]["hostNetwork"] is True
    assert rendered["metadata"]["annotations"]["a"] == "b"
    assert containers(rendered)["worker"]["image"] == "mine"
    assert env(containers(rendered)["worker"])["DEBUG"] == "1"
    assert env(containers(rendered)["worker"])["SLUICE_ROLE"] == "rollout"
    assert containers(rendered)["engine"] == containers(render(make_job(), "rollout"))["engine"]


def test_overrides_go_over_the_roles_template() -> None:
    job = make_job(
        trainer={"template": {"spec": {"priorityClassName": "low"}}},
        podTemplateOverrides=[
            {"roles": ["trainer"], "template": {"spec": {"priorityClassName": "high"}}}
        ],
    )
    assert render(job, "trainer")["spec"]["priorityClassName"] == "high"
    assert "priorityClassName" not in render(job, "buffer")["spec"]


def test_no_template_can_change_who_a_pod_is() -> None:
    labels = {"sluice.dev/attempt": "99", "team": "rl"}
    template = {"metadata": {"name": "x", "labels": labels}, "spec": {"restartPolicy": "Always"}}
    rendered = render(make_job(trainer={"template": template}), "trainer")
    assert rendered["metadata"]["name"] == "demo-trainer-0-3-0"
    assert rendered["metadata"]["labels"]["sluice.dev/attempt"] == "3"
    assert rendered["metadata"]["labels"]["team"] == "rl"
    assert rendered["spec"]["restartPolicy"] == "Never"


def test_the_engine_does_not_get_the_token() -> None:
    rendered = containers(render(make_job(), "rollout"))
    assert "SLUICE_TOKEN" in env(rendered["worker"])
    assert "SLUICE_TOKEN" not in env(rendered["engine"])


def test_only_the_first_pod_of_an_engine_has_a_worker() -> None:
    job = make_job(rollout={"gpusPerReplica": 8, "nodesPerReplica": 2})
    assert list(containers(render(job, "rollout", 0, 2))) == ["engine", "worker"]
    assert list(containers(render(job, "rollout", 1, 2))) == ["engine"]


@pytest.mark.parametrize("role", ["trainer", "rollout", "buffer", "rendezvous"])
def test_every_container_knows_what_the_contract_promises(role: str) -> None:
    for container in render(make_job(), role)["spec"]["containers"]:
        variables = env(container)
        assert variables["SLUICE_JOB_FILE"] == "/sluice/config/rljob.json"
        assert variables["SLUICE_RENDEZVOUS"] == "10.0.0.1:7700"
        assert (variables["SLUICE_ROLE"], variables["SLUICE_NAME"]) == (role, f"{role}-0")
        assert (
            variables["SLUICE_ATTEMPT"],
            variables["SLUICE_REPLICA"],
            variables["SLUICE_INDEX"],
        ) == (
            "3",
            "0",
            "0",
        )
        assert variables["SLUICE_BIND"] == "0.0.0.0"
        assert variables["SLUICE_ADVERTISE"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        for port in container["ports"]:
            assert variables[f"SLUICE_PORT_{port['name'].upper()}"] == str(port["containerPort"])


def place(body: KubeObject, container: str, path: str) -> tuple[Any, Any] | None:
    """Return (volume's source, directory in it) of a container's mount at this path, or None."""
    mounts = {mount["mountPath"]: mount for mount in containers(body)[container]["volumeMounts"]}
    if path not in mounts:
        return None
    volume = next(item for item in body["spec"]["volumes"] if item["name"] == mounts[path]["name"])
    return {key: value for key, value in volume.items() if key != "name"}, mounts[path].get(
        "subPath"
    )


def test_checkpoints_and_the_runs_files_lie_on_the_jobs_claim() -> None:
    rendered, claim = (
        render(make_job(), "trainer"),
        {"persistentVolumeClaim": {"claimName": "demo-checkpoint-1234"}},
    )
    assert place(rendered, "trainer", "/sluice/run") == (claim, None)
    assert place(rendered, "trainer", "/sluice/checkpoint") == (claim, "checkpoints"), (
        "as in runs/NAME on a laptop"
    )


def test_an_ephemeral_jobs_files_go_with_its_pod() -> None:
    rendered = render(make_job(checkpoint={"ephemeral": True}), "trainer")
    assert place(rendered, "trainer", "/sluice/run") == ({"emptyDir": {}}, None)
    assert place(rendered, "trainer", "/sluice/checkpoint") == ({"emptyDir": {}}, "checkpoints")


@pytest.mark.parametrize(
    ("checkpoint", "run", "path"),
    [
        ({}, {"persistentVolumeClaim": {"claimName": "demo-checkpoint-1234"}}, None),
        ({"volume": CLAIM}, CLAIM, "demo/run"),
        ({"ephemeral": True}, {"emptyDir": {}}, None),
    ],
    ids=["claim", "volume", "ephemeral"],
)
def test_with_an_object_store_only_the_first_pod_of_the_trainer_has_the_claim(
    checkpoint: dict[str, Any], run: dict[str, Any], path: str | None
) -> None:
    spec = {"checkpoint": {"to": "s3://bucket/demo", **checkpoint}, "trainer": {"nodes": 2}}
    first, second = (render(make_job(**spec), "trainer", index) for index in (0, 1))
    assert place(first, "trainer", "/sluice/run") == (run, path)
    assert place(second, "trainer", "/sluice/run") == ({"emptyDir": {}}, path)
    for rendered in (first, second):
        assert place(rendered, "trainer", "/sluice/checkpoint") == ({"emptyDir": {}}, None)


@pytest.mark.parametrize(
    ("spec", "shared"),
    [
        ({}, False),
        ({"weightSync": {"transport": "disk"}}, True),
        ({"weightSync": {"transport": "disk"}, "checkpoint": {"volume": CLAIM}}, True),
        ({"weightSync": {"transport": "disk"}, "checkpoint": {"to": "s3://bucket/demo"}}, True),
        ({"trainer": {"colocate": True}, "rollout": {"gpusPerReplica": 1}}, True),
        (
            {
                "trainer": {"colocate": True},
                "rollout": {"gpusPerReplica": 1},
                "checkpoint": {"volume": CLAIM},
            },
            True,
        ),
    ],
    ids=str,
)
def test_engines_read_where_the_trainer_writes_when_weights_travel_by_disk(
    spec: dict[str, Any], shared: bool
) -> None:
    job = make_job(**{**spec, "trainer": {"gpusPerNode": 1, **spec.get("trainer", {})}})
    trainer = place(render(job, "trainer"), "trainer", "/sluice/checkpoint")
    assert trainer is not None
    assert place(render(job, "rollout"), "engine", "/sluice/checkpoint") == (
        trainer if shared else None
    )


def test_a_pod_names_a_claim_once_whatever_it_is_for() -> None:
    """Kubelet does not start a pod whose volumes name a claim twice."""
    claim = {"persistentVolumeClaim": {"claimName": "all"}}
    read_only = {"persistentVolumeClaim": {"claimName": "all", "readOnly": True}}
    job = make_job(
        model={"path": "m", "volume": read_only},
        data={"prompts": [{"path": "d.jsonl"}], "volume": claim},
        checkpoint={"volume": claim},
    )
    for role in ("trainer", "rollout", "buffer"):
        spec = render(job, role)["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert [
            name
            for name, volume in volumes.items()
            if volume.get("persistentVolumeClaim") == claim["persistentVolumeClaim"]
        ] == ["model"]
        for container in spec["containers"]:
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert mounts["/sluice/data"] == {
                "name": "model",
                "mountPath": "/sluice/data",
                "readOnly": True,
            }
            assert all(mount["name"] in volumes for mount in mounts.values())
    trainer = {
        mount["mountPath"]: mount
        for mount in containers(render(job, "trainer"))["trainer"]["volumeMounts"]
    }
    assert (trainer["/sluice/checkpoint"]["name"], trainer["/sluice/run"]["name"]) == (
        "model",
        "model",
    )


def test_code_that_makes_rows_has_no_token_and_sees_its_own_directory_alone() -> None:
    rendered = pod(
        JOBS["rows"], Gang("buffer", 0, 1), 1, 0, "1.2.3.4:7700", Images(rollout="worker:1")
    )
    (init,) = rendered["spec"]["initContainers"]
    assert init["image"] == "worker:1"
    assert not {"SLUICE_TOKEN", "SLUICE_TLS_DIR"} & {variable["name"] for variable in init["env"]}
    storage = [mount for mount in init["volumeMounts"] if mount["name"] == "storage"]
    assert storage == [{"name": "storage", "mountPath": "/sluice/rows", "subPath": "rows"}]
    assert init["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "tls" not in [mount["name"] for mount in init["volumeMounts"]]


def test_a_job_of_files_has_no_container_that_makes_rows() -> None:
    assert (
        "initContainers"
        not in pod(JOBS["laptop"], Gang("buffer", 0, 1), 1, 0, "", Images())["spec"]
    )


def test_the_engine_starts_with_our_plugin_from_the_workers_image() -> None:
    rendered = pod(make_job(), Gang("rollout", 0, 1), 1, 0, "", Images(rollout="worker:1"))
    (init,) = rendered["spec"]["initContainers"]
    assert (init["image"], init["env"]) == ("worker:1", [])
    assert init["command"][-1] == "/sluice/sglang"
    assert containers(rendered)["engine"]["command"] == [
        "python3",
        "/sluice/sglang/launch_server.py",
    ]
    mounts = containers(rendered)["engine"]["volumeMounts"]
    assert {"name": "sglang", "mountPath": "/sluice/sglang", "readOnly": True} in mounts
    assert {"name": "sglang", "emptyDir": {}} in rendered["spec"]["volumes"]


def test_without_the_plugin_sglang_is_started_as_it_is() -> None:
    rendered = render(make_job(weightSync={"enginePlugin": False}), "rollout")
    assert containers(rendered)["engine"]["command"] == ["python3", "-m", "sglang.launch_server"]
    assert "initContainers" not in rendered["spec"]
    assert "sglang" not in [volume["name"] for volume in rendered["spec"]["volumes"]]


TEMPLATE = {
    "spec": {
        "containers": [
            {"name": "worker", "env": [{"name": "A", "value": "1"}], "image": "mine:1"},
            {"name": "engine", "env": [{"name": "B", "value": "2"}]},
            {"name": "proxy", "image": "proxy:1"},
        ]
    }
}
WIDE = {"nodesPerReplica": 2, "gpusPerReplica": 1}


@pytest.mark.parametrize(
    ("index", "expected"),
    [(0, ["engine", "worker", "proxy"]), (1, ["engine", "proxy"])],
    ids=["the first pod", "a follower, which has no worker"],
)
def test_a_template_changes_the_containers_that_a_pod_has(index: int, expected: list[str]) -> None:
    job = make_job(rollout=WIDE | {"template": TEMPLATE}, weightSync={"transport": "disk"})
    rendered = pod(job, Gang("rollout", 0, 2), 1, index, "1.2.3.4:7700", Images())
    assert [container["name"] for container in rendered["spec"]["containers"]] == expected
    assert {"name": "B", "value": "2"} in containers(rendered)["engine"]["env"]
    assert all(container["image"] for container in rendered["spec"]["containers"])


def test_a_template_of_several_roles_changes_each_where_it_is() -> None:
    variable = {"name": "A", "value": "1"}
    entries = [{"name": name, "env": [variable]} for name in ("trainer", "worker", "proxy")]
    sidecar = {"spec": {"containers": [{"name": "proxy", "image": "proxy:1"}]}}
    override = {"roles": ["trainer", "rollout"], "template": {"spec": {"containers": entries}}}
    job = make_job(trainer={"template": sidecar}, podTemplateOverrides=[override])
    trainer, rollout = containers(render(job, "trainer")), containers(render(job, "rollout"))
    assert [*trainer, *rollout] == ["trainer", "proxy", "engine", "worker"]
    changed = [trainer["trainer"], trainer["proxy"], rollout["worker"]]
    assert all(variable in item["env"] for item in changed)
