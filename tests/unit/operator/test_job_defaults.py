"""Defaults of a whole cluster, for fields that a job does not set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLEnginePool
from sluice.runtime.pod_env import ConfigurationError
from sluice_operator import settings
from sluice_operator.plan import KubeObject, Observed, Plan, plan
from sluice_operator.plan.facts.job_defaults import (
    JobDefaults,
    defaulted_fields,
    with_job_defaults,
    with_pool_defaults,
)
from sluice_operator.plan.manifests.objects import config_map
from sluice_operator.spec_acceptance import accept
from tests.unit.operator.world import START, World, make_job

GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists"}
DEFAULTS = JobDefaults.model_validate(
    {
        "storageClassName": "fast",
        "otlpEndpoint": "http://collector:4318",
        "priorityClassName": "batch",
        "nodeSelector": {"pool": "rl"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "mirror"}],
        "trainer": {
            "tolerations": [GPU_TAINT],
            "resources": {"requests": {"cpu": 96, "memory": "1200Gi"}},
        },
        "rollout": {
            "workerResources": {"limits": {"memory": "4Gi"}},
            "priorityClassName": "preemptible",
        },
        "rendezvous": {"nodeSelector": {"pool": "system"}},
    }
)


class WithDefaults(World):
    def observed(self) -> Observed:
        plain = super().observed()
        return Observed(plain.pods, plain.objects, plain.status, plain.progress, defaults=DEFAULTS)


def created(**spec: Any) -> dict[str, KubeObject]:
    """Pods and claims by role or name, as a first pass and the next one make them."""
    world = WithDefaults(make_job(**spec))
    plans: list[Plan] = [world.step(), world.step()]
    objects = [item for decision in plans for item in decision.create]
    return {
        stored["metadata"]["labels"].get("sluice.dev/role") or stored["metadata"]["name"]: stored
        for stored in objects
    }


def test_the_process_that_is_ours_in_each_pod_knows_where_traces_go() -> None:
    pods, names = created(), {"rollout": "worker"}
    for role in ("trainer", "rollout", "buffer", "rendezvous"):
        ours = {names.get(role, role)}
        values = {
            container["name"]
            for container in pods[role]["spec"]["containers"]
            for variable in container["env"]
            if variable["name"] == "OTEL_EXPORTER_OTLP_ENDPOINT"
            and variable["value"] == "http://collector:4318"
        }
        assert values == ours


def test_pods_get_what_the_job_does_not_say() -> None:
    pods = created()
    trainer = pods["trainer"]["spec"]
    assert trainer["nodeSelector"] == {"pool": "rl"}
    assert trainer["tolerations"] == [{"key": "team", "operator": "Exists"}, GPU_TAINT]
    assert trainer["imagePullSecrets"] == [{"name": "mirror"}]
    assert trainer["containers"][0]["resources"]["requests"] == {"cpu": "96", "memory": "1200Gi"}
    assert (trainer["priorityClassName"], pods["rollout"]["spec"]["priorityClassName"]) == (
        "batch",
        "preemptible",
    )
    assert pods["rollout"]["spec"]["containers"][1]["resources"]["limits"] == {"memory": "4Gi"}
    assert pods["rendezvous"]["spec"]["nodeSelector"] == {"pool": "system"}
    assert pods["buffer"]["spec"]["nodeSelector"] == {"pool": "rl"}


def test_claims_get_the_storage_class() -> None:
    objects = created()
    assert objects["demo-buffer"]["spec"]["storageClassName"] == "fast"
    assert objects["demo-checkpoint-1234"]["spec"]["storageClassName"] == "fast"
    own = created(buffer={"storage": {"storageClassName": "mine"}}, checkpoint={"ephemeral": True})
    assert own["demo-buffer"]["spec"]["storageClassName"] == "mine"
    assert "demo-checkpoint-1234" not in own


@pytest.mark.parametrize(
    ("gpus", "spec", "expected"),
    [
        (1, {}, "shared"),
        (1, {"kernelCache": {"volume": {"nfs": {"server": "mine", "path": "/"}}}}, "mine"),
        (0, {}, None),
    ],
    ids=["a job on GPUs that names none", "one that names its cache", "a job on CPUs"],
)
def test_jobs_on_gpus_keep_kernels_where_the_cluster_says(
    gpus: int, spec: dict[str, Any], expected: str | None
) -> None:
    cache = {"kernelCache": {"volume": {"nfs": {"server": "shared", "path": "/kernels"}}}}
    job = make_job(
        trainer={"gpusPerNode": gpus, "steps": 1}, rollout={"gpusPerReplica": gpus}, **spec
    )
    result = with_job_defaults(job, JobDefaults.model_validate(cache)).spec.kernel_cache
    assert (result and result.volume["nfs"]["server"]) == expected


SHARED = {"hostPath": {"path": "/var/lib/sluice"}}


@pytest.mark.parametrize(
    ("explicit", "volume", "secret"),
    [
        pytest.param(None, SHARED, "shared", id="a job that says nothing"),
        pytest.param({"secretRef": {"name": "own"}}, SHARED, "own", id="its own Secret"),
        pytest.param({"volume": {"emptyDir": {}}}, {"emptyDir": {}}, "shared", id="its own volume"),
    ],
)
def test_downloads_of_the_cluster(explicit: Any, volume: Any, secret: str) -> None:
    defaults = JobDefaults.model_validate(
        {"downloads": {"volume": SHARED, "secretRef": {"name": "shared"}}}
    )
    of_job = with_job_defaults(make_job(downloads=explicit), defaults).spec.downloads
    pool = {"model": {"path": "org/name"}, "downloads": explicit}
    made = RLEnginePool.model_validate({"metadata": {"name": "shared"}, "spec": pool})
    of_pool = with_pool_defaults(made, defaults).spec.downloads
    assert of_job is not None
    assert of_job == of_pool
    assert (of_job.volume, of_job.secret_ref and of_job.secret_ref.name) == (volume, secret)


def test_what_the_job_says_goes_first() -> None:
    template: dict[str, Any] = {
        "spec": {"nodeSelector": {"pool": "mine"}, "tolerations": [], "priorityClassName": None}
    }
    resources = {"limits": {"memory": "64Gi"}}
    trainer = created(
        trainer={"gpusPerNode": 0, "steps": 1, "template": template, "resources": resources}
    )["trainer"]
    assert trainer["spec"]["nodeSelector"] == {"pool": "mine"}
    assert trainer["spec"]["tolerations"] == []
    assert "priorityClassName" not in trainer["spec"]
    requested = trainer["spec"]["containers"][0]["resources"]
    assert requested == {"requests": {"cpu": "96"}, "limits": {"memory": "64Gi"}}, (
        "no request above the job's own limit"
    )
    overrides = [
        {"roles": ["rendezvous"], "template": {"spec": {"nodeSelector": {"pool": "ours"}}}}
    ]
    assert created(podTemplateOverrides=overrides)["rendezvous"]["spec"]["nodeSelector"] == {
        "pool": "ours"
    }


def test_the_user_sees_them_in_an_event_and_beside_the_manifest() -> None:
    world = WithDefaults(make_job())
    world.settle()
    (event,) = [item for item in world.events if item.reason == "DefaultsApplied"]
    assert "spec.buffer.storage.storageClassName: 'fast'" in event.message
    assert "spec.trainer.resources.requests.memory: '1200Gi'" in event.message
    data = world.objects["ConfigMap", "demo-config"]["data"]
    assert json.loads(data["defaults.json"])["storageClassName"] == "fast"
    assert data["rljob.json"] == config_map(make_job())["data"]["rljob.json"], (
        "the job's own file is what its user wrote"
    )


def test_a_running_job_takes_no_notice_of_new_defaults() -> None:
    """They are no change of its spec, and its pods and claims stay as they are."""
    job = make_job()
    stored = job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    stored = {"metadata": {"name": "demo", "namespace": "default"}, "spec": stored["spec"]}
    assert accept(stored, config_map(job, DEFAULTS)).refused == ""
    world = WithDefaults(job)
    world.settle()
    before = plan(job, world.observed(), START)
    assert (before.create, before.delete) == ((), ())


def test_without_defaults_a_job_is_what_it_says() -> None:
    job = make_job()
    assert with_job_defaults(job, JobDefaults()) is job
    assert defaulted_fields(job, JobDefaults()) == []
    assert list(config_map(job)["data"]) == ["rljob.json"]


def test_the_operator_reads_them_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "defaults.json"
    file.write_text(json.dumps({"storageClassName": "fast"}))
    assert settings.read({"SLUICE_JOB_DEFAULTS": str(file)}).job_defaults == JobDefaults(
        storage_class_name="fast"
    )
    assert settings.read({}).job_defaults == JobDefaults()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"storageclass": "fast"}', r"storageclass: .*not known|storageclass"),
        (
            '{"trainer": {"resources": {"requests": {"cpu": "lots"}}}}',
            r"trainer\.resources\.requests\.cpu.*lots",
        ),
        ("{", "defaults.json"),
    ],
    ids=["unknown field", "wrong value", "no JSON"],
)
def test_a_wrong_file_ends_the_operator_with_the_field(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "defaults.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        settings.read({"SLUICE_JOB_DEFAULTS": str(tmp_path / "defaults.json")})


def test_settings_may_stand_on_the_command_line() -> None:
    config = settings.read({"SLUICE_PROBE_SECONDS": "10"}, ["--probe-seconds=2.5", "--workers=3"])
    assert (config.probe_seconds, config.workers) == (2.5, 3)


@pytest.mark.parametrize("argument", ["--probe-second=1", "--workers", "workers=3"])
def test_an_unknown_argument_is_refused_with_the_known_ones(argument: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{argument}.*--workers=\.\.\."):
        settings.read({}, [argument])
