import json
from typing import Any

import pytest

from sluice import __version__
from sluice_operator.plan import KubeObject, Observed, render_all
from sluice_operator.plan.facts import names
from sluice_operator.plan.manifests.network import OPERATOR_LABELS
from sluice_operator.plan.manifests.objects import (
    missing_objects,
    rendezvous_address,
    resolved_manifest,
    supporting_objects,
)
from tests.unit.operator.world import make_job

VOLUME = {"persistentVolumeClaim": {"claimName": "shared"}}


def test_what_is_missing_is_made_once() -> None:
    job = make_job()
    supporting = supporting_objects(job)
    assert missing_objects(job, Observed()) == supporting
    objects = {
        (document["kind"], document["metadata"]["name"]): document for document in supporting
    }
    assert missing_objects(job, Observed(objects=objects)) == ()


def test_all_objects_but_the_checkpoints_claim_are_owned_by_the_job() -> None:
    objects = {
        document["metadata"]["name"]: document["metadata"]
        for document in supporting_objects(make_job())
    }
    claim = objects.pop("demo-checkpoint-1234")
    assert {stored["ownerReferences"][0]["uid"] for stored in objects.values()} == {"1234"}
    assert "ownerReferences" not in claim
    assert (
        claim["labels"] | {"sluice.dev/job-name": "demo", "sluice.dev/job-uid": "1234"}
        == claim["labels"]
    )


def test_every_object_has_the_recommended_labels_and_pods_their_component() -> None:
    job = make_job()
    for item in render_all(job):
        labels, prefix = item["metadata"]["labels"], "app.kubernetes.io/"
        recommended = {
            key.removeprefix(prefix): value
            for key, value in labels.items()
            if key.startswith(prefix)
        }
        component = {"component": labels["sluice.dev/role"]} if item["kind"] == "Pod" else {}
        assert recommended == {
            "name": "rljob",
            "instance": "demo",
            "version": __version__,
            "part-of": "sluice",
            "managed-by": "sluice",
            **component,
        }, item["metadata"]["name"]


def test_a_template_may_say_other_recommended_labels_but_no_other_identity() -> None:
    labels = {"app.kubernetes.io/part-of": "search", "sluice.dev/role": "buffer"}
    (trainer,) = [
        item
        for item in render_all(make_job(trainer={"template": {"metadata": {"labels": labels}}}))
        if item["metadata"]["name"].startswith("demo-trainer")
    ]
    assert trainer["metadata"]["labels"]["app.kubernetes.io/part-of"] == "search"
    assert trainer["metadata"]["labels"]["sluice.dev/role"] == "trainer"


def test_no_pod_of_a_job_looks_like_the_operator_to_a_network_policy() -> None:
    (trainer,) = [
        item for item in render_all(make_job()) if "demo-trainer" in item["metadata"]["name"]
    ]
    assert not OPERATOR_LABELS.items() <= trainer["metadata"]["labels"].items()


def checkpoint_claim(**spec: Any) -> KubeObject | None:
    objects = {
        document["metadata"]["name"]: document for document in supporting_objects(make_job(**spec))
    }
    return objects.get("demo-checkpoint-1234")


@pytest.mark.parametrize(
    "place", [{"volume": VOLUME}, {"ephemeral": True}], ids=["volume", "ephemeral"]
)
def test_no_claim_is_made_where_checkpoints_lie_elsewhere(place: dict[str, Any]) -> None:
    assert checkpoint_claim(checkpoint=place) is None


def test_the_claim_is_what_the_spec_wants_and_goes_with_the_job_where_it_says_so() -> None:
    storage = {
        "size": "2Ti",
        "storageClassName": "fast",
        "accessModes": ["ReadWriteMany"],
        "whenDeleted": "Delete",
    }
    claim = checkpoint_claim(checkpoint={"storage": storage})
    assert claim is not None
    assert claim["metadata"]["ownerReferences"][0]["uid"] == "1234"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "2Ti"}},
        "storageClassName": "fast",
    }


@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        pytest.param({}, "ReadWriteOnce", id="one trainer pod"),
        pytest.param({"trainer": {"nodes": 2}}, "ReadWriteMany", id="trainer pods of two nodes"),
        pytest.param(
            {"trainer": {"nodes": 2}, "checkpoint": {"to": "s3://bucket/demo"}},
            "ReadWriteOnce",
            id="checkpoints of two nodes in an object store",
        ),
        pytest.param(
            {"weightSync": {"transport": "disk"}},
            "ReadWriteMany",
            id="engines of any node read weights",
        ),
        pytest.param(
            {"trainer": {"gpusPerNode": 2, "colocate": True}, "rollout": {"gpusPerReplica": 1}},
            "ReadWriteOnce",
            id="engines on the trainer's node read weights",
        ),
        pytest.param(
            {
                "weightSync": {"transport": "disk"},
                "checkpoint": {"storage": {"accessModes": ["ReadWriteOnce"]}},
            },
            "ReadWriteOnce",
            id="a cluster of one node",
        ),
    ],
)
def test_pods_of_several_nodes_need_a_claim_that_all_can_mount(
    spec: dict[str, Any], mode: str
) -> None:
    claim = checkpoint_claim(**spec)
    assert claim is not None
    assert claim["spec"]["accessModes"] == [mode]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, None),
        ({"clusterIP": ""}, None),
        ({"clusterIP": "10.0.0.7", "ports": [{"port": 7700}]}, "10.0.0.7:7700"),
        ({"clusterIP": "fd00::7", "ports": [{"port": 7700}]}, "[fd00::7]:7700"),
    ],
    ids=str,
)
def test_rendezvous_address(spec: dict[str, Any], expected: str | None) -> None:
    objects = {("Service", "demo-rendezvous"): {"spec": spec}}
    assert rendezvous_address(make_job(), Observed(objects=objects)) == expected


def test_paths_in_the_resolved_manifest_are_those_of_the_pod() -> None:
    job = make_job(
        model={"path": "./qwen", "volume": VOLUME, "referencePath": "base/step-1"},
        data={"prompts": [{"path": "train.jsonl@[0:100]"}], "volume": VOLUME},
        evaluation={"datasets": [{"path": "/test.jsonl"}]},
        rollout={"speculative": {"algorithm": "draft", "model": "small"}},
        algorithm={
            "estimator": "ppo",
            "critic": {"modelPath": "reward"},
            "distillation": {"teacher": {"path": "./large"}},
        },
    )
    spec = resolved_manifest(job)["spec"]
    assert spec["model"]["path"] == "/sluice/model/qwen"
    assert spec["model"]["referencePath"] == "/sluice/model/base/step-1"
    assert spec["algorithm"]["critic"]["modelPath"] == "/sluice/model/reward"
    assert spec["algorithm"]["distillation"]["teacher"]["path"] == "/sluice/model/large"
    assert spec["rollout"]["speculative"]["model"] == "/sluice/model/small"
    assert spec["data"]["prompts"][0]["path"] == "/sluice/data/train.jsonl@[0:100]"
    assert spec["evaluation"]["datasets"][0]["path"] == "/sluice/data/test.jsonl"


def test_so_are_those_of_tokenizers_and_dumped_rollouts_and_functions_are_the_images() -> None:
    judge = {"model": {"url": "http://rm", "tokenizer": "judge"}}
    job = make_job(
        model={"path": "qwen", "volume": VOLUME},
        data={"prompts": [{"source": {"function": "rows.py:make"}}], "volume": VOLUME},
        evaluation={"datasets": [{"path": "/test.jsonl", "reward": judge}]},
        reward={"type": None, **judge},
        debug={"replay": "run/rollouts"},
        rollout={"replicas": 0},
    )
    spec = resolved_manifest(job)["spec"]
    assert spec["reward"]["model"]["tokenizer"] == "/sluice/model/judge"
    assert (
        spec["evaluation"]["datasets"][0]["reward"]["model"]["tokenizer"] == "/sluice/model/judge"
    )
    assert spec["debug"]["replay"] == "/sluice/data/run/rollouts"
    assert spec["data"]["prompts"][0] == {"source": {"function": "rows.py:make"}}


@pytest.mark.parametrize(("path", "expected"), [
    (".", "/sluice/model"),
    ("./", "/sluice/model"),
    ("a/b/", "/sluice/model/a/b"),
    ("/a", "/sluice/model/a"),
    ("/sluice/model/a", "/sluice/model/a"),
    ("/sluice/model", "/sluice/model"),
    ("/sluice/models/a", "/sluice/model/sluice/models/a"),
])  # fmt: skip
def test_a_path_in_a_volume_is_mounted_once(path: str, expected: str) -> None:
    job = make_job(model={"path": path, "volume": VOLUME})
    assert resolved_manifest(job)["spec"]["model"]["path"] == expected
    again = make_job(model={"path": expected, "volume": VOLUME})
    assert resolved_manifest(again)["spec"]["model"]["path"] == expected


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
    secrets = [
        document["metadata"]["name"]
        for document in supporting_objects(job)
        if document["kind"] == "Secret"
    ]
    assert secrets == ["demo-token-1234", "demo-tls-1234"]


def test_without_tls_there_are_no_certificates() -> None:
    annotations = [
        document["metadata"].get("annotations") for document in supporting_objects(make_job())
    ]
    assert {names.GENERATE: names.GENERATE_TLS} not in annotations
