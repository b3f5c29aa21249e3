"""Pods of a job with URIs: which role fetches what, and what its containers see."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.api import RLEnginePool, RLJob, manifest
from sluice.api.job import RLJobSpec
from sluice.api.schema.paths import marked
from sluice_operator.plan import Observed
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.job_defaults import JobDefaults
from sluice_operator.plan.facts.model import Gang, Images, KubeObject
from sluice_operator.plan.manifests import downloads
from sluice_operator.plan.manifests.engine_pool import stateful_set
from sluice_operator.plan.manifests.objects import config_map, resolved_manifest
from sluice_operator.plan.manifests.pods import pod
from sluice_operator.plan.report.fetching import model_fetched
from sluice_operator.spec_acceptance import Accepted, accept
from tests.unit.operator.world import START, job_pass, make_job, make_pod

SECRET = {"secretRef": {"name": "bucket"}}
LINKS = "/sluice/downloads/rljobs/default-demo-1234"
ROLES = ("trainer", "rollout", "buffer", "rendezvous")


def rendered(job: RLJob, role: Any) -> KubeObject:
    body: KubeObject = pod(job, Gang(role, 0, 1), 1, 0, "10.0.0.1:7700", Images())["spec"]
    return body


def fetch(job: RLJob, role: Any) -> dict[str, Any] | None:
    inits = rendered(job, role).get("initContainers", [])
    return next((container for container in inits if container["name"] == "fetch"), None)


def fetched(job: RLJob, role: Any) -> list[str]:
    container = fetch(job, role)
    return container["command"][3:] if container else []


@pytest.fixture(scope="module")
def job() -> RLJob:
    return make_job(
        model={"path": "hf://org/name@v1"},
        data={"prompts": [{"path": "s3://bucket/rows.jsonl@[0:9]"}, {"path": "/data/own.jsonl"}]},
        trainer={"steps": 10, "lora": {"rank": 8, "from": "org/adapter"}},
        secrets={"huggingFace": {"name": "hf", "key": "token"}},
        downloads=SECRET,
    )


def test_each_role_fetches_what_it_reads(job: RLJob) -> None:
    model = "spec.model.path=hf://org/name@v1"
    assert {role: fetched(job, role) for role in ROLES} == {
        "trainer": [model, "spec.trainer.lora.from=hf://org/adapter"],
        "rollout": [model],
        "buffer": ["spec.data.prompts[0].path=s3://bucket/rows.jsonl"],
        "rendezvous": [],
    }


def test_a_buffer_that_encodes_answers_fetches_the_model() -> None:
    job = make_job(
        model={"path": "hf://org/name"}, algorithm={"loss": {"type": "sft"}}, reward=None
    )
    assert fetched(job, "buffer") == ["spec.model.path=hf://org/name"]


@pytest.mark.parametrize(
    ("spec", "role", "expected"),
    [
        (
            {
                "rollout": {
                    "gpusPerReplica": 0,
                    "speculative": {"algorithm": "draft", "model": "o/d"},
                }
            },
            "rollout",
            "spec.rollout.speculative.model=hf://o/d",
        ),
        ({"model": {"referencePath": "o/r"}}, "trainer", "spec.model.referencePath=hf://o/r"),
    ],
    ids=["draft", "reference"],
)
def test_other_models(spec: dict[str, Any], role: str, expected: str) -> None:
    assert fetched(make_job(**spec), role) == [expected]


def test_paths_in_pods_are_links(job: RLJob) -> None:
    spec = resolved_manifest(job)["spec"]
    paths = {path.field: path.value for path in marked(RLJobSpec, spec)}
    assert paths["spec.model.path"].startswith(f"{LINKS}/")
    assert paths["spec.model.path"].endswith("/name")
    assert paths["spec.data.prompts[0].path"].endswith("/rows.jsonl@[0:9]")
    assert paths["spec.data.prompts[1].path"] == "/data/own.jsonl"
    assert "://" not in json.dumps(list(paths.values()))
    engine = rendered(job, "rollout")["containers"][0]
    assert engine["args"][:2] == ["--model-path", paths["spec.model.path"]]


def test_only_the_init_container_has_credentials_and_writes(job: RLJob) -> None:
    hub = {"secretKeyRef": {"name": "hf", "key": "token"}}
    for role in ("trainer", "rollout", "buffer"):
        init, body = fetch(job, role), rendered(job, role)
        assert init is not None
        assert init["envFrom"] == [SECRET]
        assert {"name": "HF_TOKEN", "valueFrom": hub} in init["env"]
        assert not {"SLUICE_TOKEN", "HF_HUB_OFFLINE"} & {entry["name"] for entry in init["env"]}
        assert init["volumeMounts"] == [{"name": "downloads", "mountPath": "/sluice/downloads"}]
        for container in body["containers"]:
            assert SECRET not in container.get("envFrom", [])
            mount = {"name": "downloads", "mountPath": "/sluice/downloads", "readOnly": True}
            assert mount in container["volumeMounts"]
        assert {"name": "downloads", "emptyDir": {}} in body["volumes"]


@pytest.mark.parametrize("gpus", [0, 1])
def test_it_never_runs_as_root(gpus: int) -> None:
    job = make_job(model={"path": "hf://org/name"}, rollout={"gpusPerReplica": gpus})
    container, body = fetch(job, "rollout"), rendered(job, "rollout")
    assert container is not None
    context = body["securityContext"] | container["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 65532)


def test_a_job_without_uris_is_as_before() -> None:
    plain = make_job()
    for role in ROLES:
        assert rendered(make_job(downloads=SECRET), role) == rendered(plain, role)
        assert downloads.VOLUME not in json.dumps(rendered(plain, role))


def test_a_claim_that_holds_the_models_too_is_mounted_once() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "shared"}}
    job = make_job(
        model={"path": "tiny", "volume": claim},
        trainer={"steps": 10, "lora": {"from": "hf://org/adapter"}},
        downloads={"volume": claim},
    )
    body, init = rendered(job, "trainer"), fetch(job, "trainer")
    assert init is not None
    assert [
        v["name"]
        for v in body["volumes"]
        if v.get("persistentVolumeClaim") == claim["persistentVolumeClaim"]
    ] == ["model"]
    assert init["volumeMounts"] == [{"name": "model", "mountPath": "/sluice/downloads"}]


def test_a_name_in_a_volume_is_a_path() -> None:
    job = make_job(model={"path": "org/name", "volume": {"hostPath": {"path": "/models"}}})
    assert fetched(job, "trainer") == []
    assert resolved_manifest(job)["spec"]["model"]["path"] == "/sluice/model/org/name"


def test_a_file_uri_is_a_path() -> None:
    job = make_job(model={"path": "file:///models/tiny"})
    assert resolved_manifest(job)["spec"]["model"]["path"] == "/models/tiny"


def test_a_dollar_sign_is_not_a_variable() -> None:
    job = make_job(data={"prompts": [{"path": "s3://bucket/$(HOME)/rows.jsonl"}]})
    assert fetched(job, "buffer") == ["spec.data.prompts[0].path=s3://bucket/$$(HOME)/rows.jsonl"]


def test_a_template_changes_the_init_container() -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    template = {"spec": {"initContainers": [{"name": "fetch", "env": [proxy]}]}}
    job = make_job(model={"path": "hf://org/name"}, trainer={"steps": 10, "template": template})
    container = fetch(job, "trainer")
    assert container is not None
    assert proxy in container["env"]
    # Without a URI there is nothing to change.
    plain = make_job(trainer={"steps": 10, "template": template})
    assert "initContainers" not in rendered(plain, "trainer")


def test_engines_of_a_pool_fetch_its_model() -> None:
    pool = RLEnginePool.model_validate(
        {
            "metadata": {"name": "shared", "uid": "5678"},
            "spec": {"model": {"path": "hf://org/name"}, "downloads": SECRET},
        }
    )
    spec = stateful_set(pool, Images(), JobDefaults())["spec"]["template"]["spec"]
    init = spec["initContainers"][0]
    assert (init["name"], init["envFrom"]) == ("fetch", [SECRET])
    assert init["command"][3:] == ["spec.model.path=hf://org/name"]
    engine = spec["containers"][0]
    links = f"{names.DOWNLOADS_DIR}/rlenginepools/default-shared-5678"
    assert [word for word in engine["args"] if word.startswith(links)]
    assert "/sluice/downloads" in [mount["mountPath"] for mount in engine["volumeMounts"]]


WORKS: KubeObject = {"running": {}}
DONE = {"terminated": {"exitCode": 0}}
REFUSED = {"terminated": {"exitCode": 2, "message": "error: spec.model.path: no such repository"}}


@pytest.mark.parametrize(
    ("states", "progress", "expected"),
    [
        pytest.param(
            [WORKS, WORKS], {"demo-rollout-0-1-0": "hf://org/name: 41.0 of 61.4 GB"},
            ("False", "Fetching", "0 of 2 pods have their files; demo-rollout-0-1-0 and 1 more: "
             "fetching hf://org/name: 41.0 of 61.4 GB"), id="both fetch"),
        pytest.param(
            [DONE, WORKS], {},
            ("False", "Fetching", "1 of 2 pods have their files; demo-rollout-0-1-0: fetching "
             "files; kubectl logs demo-rollout-0-1-0 -c fetch tells how far"), id="no log"),
        pytest.param([DONE, {"waiting": {}}], {},
                     ("False", "Fetching", "1 of 2 pods have their files"), id="one waits"),
        pytest.param([DONE, DONE], {}, ("True", "Fetched", "2 pods have their files"), id="done"),
        pytest.param([REFUSED, WORKS], {},
                     ("False", "FetchFailed",
                      "demo-trainer-0-1-0: fetch: spec.model.path: no such repository"),
                     id="refused"),
    ],
)  # fmt: skip
def test_model_fetched(
    job: RLJob, states: list[Any], progress: dict[str, str], expected: tuple[str, str, str]
) -> None:
    pods = [
        make_pod(role, phase="Pending", initContainerStatuses=[{"name": "fetch", "state": state}])
        for role, state in zip(("trainer", "rollout"), states, strict=True)
    ]
    rendezvous = make_pod("rendezvous", phase="Running")
    (found,) = model_fetched(job_pass(job, Observed((*pods, rendezvous), fetching=progress)))
    assert (found.type, found.status, found.reason, found.message) == ("ModelFetched", *expected)


def test_a_job_without_uris_has_no_condition_of_them() -> None:
    assert model_fetched(job_pass(make_job(), Observed((make_pod("trainer"),)))) == []


@pytest.mark.parametrize(("code", "final"), [(2, True), (1, False)])
def test_a_file_that_cannot_be_had_fails_the_job(code: int, final: bool) -> None:
    message = "error: spec.model.path: hf://org/name: the hub has no such repository"
    end = {"exitCode": code, "reason": "Error", "message": f"fetching\n{message}\n"}
    status = {"name": "fetch", "state": {"terminated": end}}
    failed = make_pod("trainer", phase="Failed", initContainerStatuses=[status])
    (failure,) = podstate.failures(failed, START)
    assert (podstate.config_error(failed, START) is not None) == final
    assert podstate.headline(failure) == f"fetch: {message.removeprefix('error: ')}"


def stored_with(job: RLJob, **spec: Any) -> KubeObject:
    document = manifest(job)
    return {**document, "metadata": manifest(job.metadata), "spec": document["spec"] | spec}


@pytest.mark.parametrize("path", ["hf://org/name", "org/name", "file:///models/tiny"])
def test_a_started_job_keeps_its_uris(path: str) -> None:
    job = make_job(
        model={"path": path}, data={"prompts": [{"path": "s3://bucket/rows.jsonl@[0:9]"}]}
    )
    config = config_map(job)
    assert accept(stored_with(job), config) == Accepted(job)
    # A change that is refused: pods that are made later still fetch what the job began with.
    accepted = accept(stored_with(job, model={"path": "hf://org/other"}), config)
    assert "-> 'hf://org/other'" in accepted.refused
    for role in ROLES:
        assert fetched(accepted.job, role) == fetched(job, role)
    assert resolved_manifest(accepted.job) == resolved_manifest(job)


def test_the_spec_is_read_once_for_all_pods(job: RLJob, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def dump(made: Any) -> Any:
        calls.append(made)
        return manifest(made)

    monkeypatch.setattr(downloads, "manifest", dump)
    fresh = job.model_copy(update={"spec": job.spec.model_copy()})
    for role in ROLES * 2:
        rendered(fresh, role)
    assert calls == [fresh]
