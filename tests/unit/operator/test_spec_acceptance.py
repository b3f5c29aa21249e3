"""The spec with which a job is reconciled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.api import ManifestError, RLJob, manifest
from sluice_operator.plan.manifests.objects import config_map
from sluice_operator.spec_acceptance import accept
from tests.unit.operator.world import make_job


def stored(**spec: Any) -> dict[str, Any]:
    document = manifest(make_job(**spec))
    document["metadata"] |= {"namespace": "default", "uid": "1234", "generation": 1}
    return document


def started(document: dict[str, Any]) -> dict[str, Any]:
    return config_map(RLJob.model_validate(document))


def test_a_new_job_is_taken_as_it_is() -> None:
    assert accept(stored(), None).job.spec.trainer.steps == 10


def test_unknown_fields_are_dropped_at_any_depth() -> None:
    document = stored()
    document["spec"]["former"] = {"a": 1}
    document["spec"]["trainer"]["knob"] = True
    document["spec"]["data"]["prompts"][0]["hint"] = "x"
    document["status"] = {"restarts": 3, "future": []}
    verdict = accept(document, None).job
    assert verdict.spec.trainer.steps == 10
    assert verdict.status is not None
    assert verdict.status.restarts == 3


def test_an_invalid_new_spec_names_job_and_field() -> None:
    document = stored()
    document["spec"]["trainer"]["steps"] = "many"
    with pytest.raises(ManifestError, match=r"RLJob default/demo: spec\.trainer\.steps: "):
        accept(document, None)


def test_a_template_that_no_pod_can_have_is_refused_before_the_start_and_not_after() -> None:
    document = stored(trainer={"template": {"spec": {"nodeSelctor": {"a": "b"}}}})
    with pytest.raises(
        ManifestError,
        match=r"nodeSelctor: no such field of a pod's spec; did you mean nodeSelector",
    ):
        accept(document, None)
    assert accept(document, started(document)).refused == ""


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ({"suspend": True}, lambda spec: spec.suspend),
        ({"rollout": {"replicas": 5}}, lambda spec: spec.rollout.replicas == 5),
        ({"activeDeadlineSeconds": 9}, lambda spec: spec.active_deadline_seconds == 9),
        ({"failurePolicy": {"maxRestarts": 9}}, lambda spec: spec.failure_policy.max_restarts == 9),
    ],
    ids=["suspend", "replicas", "deadline", "max restarts"],
)
def test_what_may_change_is_followed(change: dict[str, Any], read: Any) -> None:
    verdict = accept(stored(**change), started(stored()))
    assert verdict.refused == ""
    assert read(verdict.job.spec)


def test_any_other_change_is_refused_by_name_and_the_allowed_part_is_followed() -> None:
    verdict = accept(stored(trainer={"steps": 20}, rollout={"replicas": 5}), started(stored()))
    assert verdict.refused == "cannot be changed: spec.trainer.steps: 10 -> 20"
    assert (verdict.job.spec.trainer.steps, verdict.job.spec.rollout.replicas) == (10, 5)


def test_replicas_that_an_autoscaler_has_changed_are_followed() -> None:
    verdict = accept(stored(trainer={"steps": 20}), started(stored(rollout={"replicas": 5})))
    assert verdict.job.spec.rollout.replicas == 1


def test_a_default_that_is_written_out_is_no_change() -> None:
    assert accept(stored(trainer={"stepsPerBatch": 1}), started(stored())).refused == ""


OLD: dict[str, Any] = {"entropyCoef": 0.1, "clip": {"low": 0.1}, "loss": "clip"}
NEW: dict[str, Any] = {"entropyCoef": 0.1, "loss": {"type": "ppo", "clip": {"low": 0.1}}}


def test_a_renamed_field_of_a_new_job_is_an_error_with_its_new_name() -> None:
    document = stored()
    document["spec"]["algorithm"] = OLD
    with pytest.raises(
        ManifestError,
        match=r"spec\.algorithm\.loss is spec\.algorithm\.loss\.type since v0\.2; `sluice "
        r"migrate-manifest FILE` rewrites the file; spec\.algorithm\.clip\.low is ",
    ):
        accept(document, None)


def test_a_job_that_an_earlier_version_started_goes_on() -> None:
    document, config = stored(), started(stored(algorithm=NEW))
    document["spec"]["algorithm"] = OLD
    job = json.loads(config["data"]["rljob.json"])
    job["spec"]["algorithm"] = OLD
    config["data"]["rljob.json"] = json.dumps(job)
    verdict = accept(document, config)
    assert verdict.refused == ""
    assert verdict.job.spec.algorithm.loss.clip.low == 0.1
    assert "clip" in document["spec"]["algorithm"], "the stored object is not changed"


@pytest.mark.parametrize("path", ["models/a", "./models/a/", "."])
def test_paths_in_volumes_are_compared_as_the_user_wrote_them(path: str) -> None:
    volume = {"persistentVolumeClaim": {"claimName": "m"}}
    document = stored(
        model={"path": path, "volume": volume},
        data={"prompts": [{"path": f"{path}/train.jsonl"}], "volume": volume},
        algorithm={
            "estimator": "ppo",
            "critic": {"modelPath": path},
            "distillation": {"teacher": {"path": path}},
        },
    )
    assert accept(document, started(document)).refused == ""


ROWS = {"source": {"function": "rows.py:make"}}


@pytest.mark.parametrize("spec", [
    {"data": {"prompts": [ROWS, {"path": "train.jsonl"}]}},
    {"evaluation": {"datasets": [ROWS]}},
    {"debug": {"replay": "dumped/rollouts"}, "rollout": {"replicas": 0}},
    {"reward": {"type": None, "model": {"url": "http://rm", "tokenizer": "./judge/"}}},
    {"evaluation": {"datasets": [
        {"path": "test.jsonl", "reward": {"model": {"url": "http://rm", "tokenizer": "judge"}}},
    ]}},
], ids=["rows", "held-out rows", "replay", "tokenizer", "tokenizer of a data set"])  # fmt: skip
def test_an_unchanged_spec_is_accepted_whatever_its_volumes_hold(spec: dict[str, Any]) -> None:
    groups = {"model": {"path": "m"}, "data": {"prompts": [{"path": "d.jsonl"}]}, **spec}
    for name in ("model", "data"):
        groups[name] = {**groups[name], "volume": {"persistentVolumeClaim": {"claimName": "m"}}}
    document = stored(**groups)
    config = started(document)
    assert accept(document, config).refused == ""
    changed = accept(stored(**groups, trainer={"steps": 3}), config)
    assert changed.refused == "cannot be changed: spec.trainer.steps: 10 -> 3"
    assert config_map(changed.job)["data"] == config["data"]


def test_a_refused_change_leaves_the_config_map_as_it_was() -> None:
    volume = {"persistentVolumeClaim": {"claimName": "m"}}
    before = stored(model={"path": "models/a", "volume": volume})
    config = started(before)
    changed = stored(model={"path": "models/b", "volume": volume})
    verdict = accept(changed, config)
    assert "spec.model.path: 'models/a' -> 'models/b'" in verdict.refused
    assert config_map(verdict.job)["data"] == config["data"]


def test_a_started_job_survives_a_spec_that_became_invalid() -> None:
    document = stored(suspend=True)
    document["spec"]["trainer"]["steps"] = -1
    verdict = accept(document, started(stored()))
    assert "spec.trainer.steps" in verdict.refused
    assert verdict.job.spec.suspend
    assert verdict.job.spec.trainer.steps == 10


def test_a_started_job_survives_an_allowed_field_that_is_invalid() -> None:
    document = stored()
    document["spec"]["rollout"]["replicas"] = -1
    verdict = accept(document, started(stored()))
    assert "spec.rollout.replicas" in verdict.refused
    assert verdict.job.spec.rollout.replicas == 1
