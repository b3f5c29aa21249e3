import json
from typing import Any

import pytest
from world import make_job

from sluice_operator.plan import Observed, names
from sluice_operator.plan.objects import missing_objects, rendezvous_address, resolved_manifest, supporting_objects

VOLUME = {"persistentVolumeClaim": {"claimName": "shared"}}


def test_what_is_missing_is_made_once() -> None:
    job = make_job()
    wanted = supporting_objects(job)
    assert missing_objects(job, Observed()) == wanted
    objects = {(found["kind"], found["metadata"]["name"]): found for found in wanted}
    assert missing_objects(job, Observed(objects=objects)) == ()


def test_all_objects_are_owned_by_the_job() -> None:
    owners = [found["metadata"]["ownerReferences"][0]["uid"] for found in supporting_objects(make_job())]
    assert set(owners) == {"1234"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, None),
        ({"clusterIP": ""}, None),
        ({"clusterIP": "10.0.0.7", "ports": [{"port": 7700}]}, "10.0.0.7:7700"),
        ({"clusterIP": "fd00::7", "ports": [{"port": 7700}]}, "[fd00::7]:7700"),
    ],
)
def test_rendezvous_address(spec: dict[str, Any], expected: str | None) -> None:
    objects = {("Service", "demo-rendezvous"): {"spec": spec}}
    assert rendezvous_address(make_job(), Observed(objects=objects)) == expected


def test_paths_in_the_resolved_manifest_are_those_of_the_pod() -> None:
    job = make_job(
        model={"path": "./qwen", "volume": VOLUME, "referencePath": "base/step-1"},
        data={"prompts": [{"path": "train.jsonl@[0:100]"}], "volume": VOLUME},
        evaluation={"datasets": [{"path": "/test.jsonl"}]},
        algorithm={
            "estimator": "ppo", "critic": {"modelPath": "reward"}, "distillation": {"teacher": {"path": "./large"}},
        },
    )  # fmt: skip
    spec = resolved_manifest(job)["spec"]
    assert spec["model"]["path"] == "/sluice/model/qwen"
    assert spec["model"]["referencePath"] == "/sluice/model/base/step-1"
    assert spec["algorithm"]["critic"]["modelPath"] == "/sluice/model/reward"
    assert spec["algorithm"]["distillation"]["teacher"]["path"] == "/sluice/model/large"
    assert spec["data"]["prompts"][0]["path"] == "/sluice/data/train.jsonl@[0:100]"
    assert spec["evaluation"]["datasets"][0]["path"] == "/sluice/data/test.jsonl"


def test_the_resolved_manifest_holds_no_defaults_and_no_status() -> None:
    document = resolved_manifest(make_job())
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert document["spec"]["trainer"] == {"steps": 10, "gpusPerNode": 0}
    assert document["metadata"] == {"name": "demo", "namespace": "default"}


def test_the_job_file_is_json_and_the_token_is_left_to_whoever_applies_it() -> None:
    config, secret = supporting_objects(make_job())[:2]
    assert json.loads(config["data"][names.JOB_FILE])["kind"] == "RLJob"
    assert secret["metadata"]["annotations"] == {names.GENERATE: "token"}
    assert "data" not in secret
    assert "stringData" not in secret


def test_a_secret_carries_the_jobs_uid_in_its_name_since_it_is_never_read() -> None:
    job = make_job(tls={"enabled": True})
    secrets = [found["metadata"]["name"] for found in supporting_objects(job) if found["kind"] == "Secret"]
    assert secrets == ["demo-token-1234", "demo-tls-1234"]


def test_without_tls_there_are_no_certificates() -> None:
    annotations = [found["metadata"].get("annotations") for found in supporting_objects(make_job())]
    assert {names.GENERATE: names.GENERATE_TLS} not in annotations
