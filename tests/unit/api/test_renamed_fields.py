"""Fields that were renamed or dropped: their sentences, and the rewriting of old manifests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml.error import YAMLError

from sluice.api import ManifestError, RLJobSpec, load_job, parse_documents, parse_job
from sluice.api.schema.crd import RLJOB, custom_resource_definition
from sluice.api.schema.explain import explained
from sluice.api.schema.renamed_fields import RENAMED, migrate_spec, migrate_text, old_fields

OLD = Path(__file__).parent / "golden/v0.1.yaml"
MIGRATED = Path(__file__).parent / "golden/v0.1.migrated.yaml"
SPEC: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"prompts": [{"path": "p"}]},
    "reward": {"type": "math"},
    "trainer": {"steps": 4},
}
REWRITES = "since v0.2; `sluice migrate-manifest job.yaml` rewrites the file"
TAKES_OUT = "`sluice migrate-manifest job.yaml` takes it out"
FIELDS = [
    pytest.param(
        {"algorithm": {"loss": "cispo"}},
        {"algorithm": {"loss": {"type": "cispo"}}},
        [f"spec.algorithm.loss is spec.algorithm.loss.type {REWRITES}"],
        id="loss",
    ),
    pytest.param(
        {"algorithm": {"loss": "clip"}},
        {"algorithm": {"loss": {"type": "ppo"}}},
        [f"spec.algorithm.loss is spec.algorithm.loss.type {REWRITES}"],
        id="the loss clip is called ppo",
    ),
    pytest.param(
        {"algorithm": {"lossFunction": "mine.py:loss"}},
        {"algorithm": {"loss": {"function": "mine.py:loss"}}},
        [f"spec.algorithm.lossFunction is spec.algorithm.loss.function {REWRITES}"],
        id="lossFunction",
    ),
    pytest.param(
        {"algorithm": {"lossFunction": "sft"}, "reward": None},
        {"algorithm": {"loss": {"type": "sft"}}, "reward": None},
        [f"spec.algorithm.lossFunction is spec.algorithm.loss.type {REWRITES}"],
        id="sft is a type",
    ),
    pytest.param(
        {"algorithm": {"clip": {"low": 0.2, "dual": 3.0}}},
        {"algorithm": {"loss": {"clip": {"low": 0.2, "dual": 3.0}}}},
        [
            f"spec.algorithm.clip.low is spec.algorithm.loss.clip.low {REWRITES}",
            f"spec.algorithm.clip.dual is spec.algorithm.loss.clip.dual {REWRITES}",
        ],
        id="clip",
    ),
    pytest.param(
        {"algorithm": {"loss": "sapo", "gate": {"negative": 1.2}}},
        {"algorithm": {"loss": {"type": "sapo", "gate": {"negative": 1.2}}}},
        [
            f"spec.algorithm.loss is spec.algorithm.loss.type {REWRITES}",
            f"spec.algorithm.gate.negative is spec.algorithm.loss.gate.negative {REWRITES}",
        ],
        id="gate",
    ),
    pytest.param(
        {"algorithm": {"loss": "clip_cov", "clipCov": {"ratio": 0.1}}},
        {"algorithm": {"loss": {"type": "clip_cov", "covariance": {"ratio": 0.1}}}},
        [
            f"spec.algorithm.loss is spec.algorithm.loss.type {REWRITES}",
            f"spec.algorithm.clipCov.ratio is spec.algorithm.loss.covariance.ratio {REWRITES}",
        ],
        id="clipCov",
    ),
    pytest.param(
        {
            "algorithm": {"loss": "kl_cov", "klCov": {"ratio": 0.1, "ppoKlCoef": 2.0}},
            "trainer": {"steps": 4, "stepsPerBatch": 2},
        },
        {
            "algorithm": {"loss": {"type": "kl_cov", "covariance": {"ratio": 0.1}}},
            "trainer": {"steps": 4, "stepsPerBatch": 2},
        },
        [
            f"spec.algorithm.loss is spec.algorithm.loss.type {REWRITES}",
            "spec.algorithm.klCov.ppoKlCoef was dropped in v0.2: the weight is always 1; "
            f"{TAKES_OUT}",
            f"spec.algorithm.klCov.ratio is spec.algorithm.loss.covariance.ratio {REWRITES}",
        ],
        id="klCov",
    ),
    pytest.param(
        {"trainer": {"steps": 4, "balance": {"equalCounts": True, "by": "flops"}}},
        {"trainer": {"steps": 4, "balance": "flops"}},
        [
            "spec.trainer.balance.equalCounts was dropped in v0.2: ranks are balanced by tokens or "
            f"operations alone; {TAKES_OUT}",
            f"spec.trainer.balance.by is spec.trainer.balance {REWRITES}",
        ],
        id="balance",
    ),
    pytest.param(
        {"trainer": {"steps": 4, "balance": {"equalCounts": True}}},
        {"trainer": {"steps": 4}},
        [
            "spec.trainer.balance.equalCounts was dropped in v0.2: ranks are balanced by tokens or "
            f"operations alone; {TAKES_OUT}"
        ],
        id="an object that is empty without a dropped field",
    ),
    pytest.param(
        {"trainer": {"steps": 4, "deviceClass": "gpu.example.com"}},
        {"trainer": {"steps": 4}},
        [
            "spec.trainer.deviceClass was dropped in v0.2: the DeviceClass is always "
            f"gpu.nvidia.com; {TAKES_OUT}"
        ],
        id="deviceClass",
    ),
    pytest.param(
        {"failurePolicy": {"rolloutBackoff": {"baseSeconds": 5, "maxSeconds": 60}}},
        {"failurePolicy": {"rolloutBackoffSeconds": 5}},
        [
            "spec.failurePolicy.rolloutBackoff.baseSeconds is "
            f"spec.failurePolicy.rolloutBackoffSeconds {REWRITES}",
            "spec.failurePolicy.rolloutBackoff.maxSeconds was dropped in v0.2: the longest pause "
            f"is 30 times rolloutBackoffSeconds; {TAKES_OUT}",
        ],
        id="rolloutBackoff",
    ),
]


@pytest.mark.parametrize(("old", "new", "sentences"), FIELDS)
def test_each_old_field_has_a_sentence_and_a_new_place(
    old: dict[str, Any], new: dict[str, Any], sentences: list[str]
) -> None:
    spec = copy.deepcopy({**SPEC, **old})
    assert [field.sentence("job.yaml") for field in old_fields(spec)] == sentences
    assert migrate_spec(spec)
    assert spec == {**SPEC, **new}
    RLJobSpec.model_validate(spec)
    assert not migrate_spec(spec)


def test_every_old_field_is_in_the_table_above() -> None:
    sentences = " ".join(str(case.values[2]) for case in FIELDS)
    assert [field.old for field in RENAMED if f"spec.{field.old}" not in sentences] == []


def test_an_old_manifest_is_rewritten_with_its_comments() -> None:
    assert migrate_text(OLD.read_text()) == MIGRATED.read_text()


def test_a_present_manifest_stays_as_it_is() -> None:
    assert migrate_text(MIGRATED.read_text()) == MIGRATED.read_text()


def test_a_rewritten_manifest_is_valid() -> None:
    config, *jobs = parse_documents(migrate_text(OLD.read_text()), "v0.1.yaml")
    assert config["kind"] == "ConfigMap"
    assert [parse_job(job, "v0.1.yaml").metadata.name for job in jobs] == ["two-tools", "dapo"]


def test_the_example_as_it_was_is_rewritten_line_for_line(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples/quickstart/job.yaml"
    text = example.read_text()
    old = text.replace("loss: {clip: {low: 0.2, high: 0.28}}", "clip: {low: 0.2, high: 0.28}")
    assert old != text
    assert migrate_text(old) == text


def test_text_that_is_no_yaml_is_an_error() -> None:
    with pytest.raises(YAMLError):
        migrate_text("kind: RLJob\nspec: {")


def test_loading_an_old_manifest_says_each_new_name_once_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(OLD.read_text().split("---\n")[2])
    with pytest.raises(ManifestError) as error:
        load_job(file)
    end = f"since v0.2; `sluice migrate-manifest {file}` rewrites the file"
    assert str(error.value).splitlines() == [
        f"{file}:10: spec.algorithm.loss is spec.algorithm.loss.type {end}",
        f"{file}:9: spec.algorithm.clip.low is spec.algorithm.loss.clip.low {end}",
        f"{file}:9: spec.algorithm.clip.high is spec.algorithm.loss.clip.high {end}",
        f"{file}:11: spec.algorithm.clipCov.ratio is spec.algorithm.loss.covariance.ratio {end}",
    ]


def test_an_override_with_an_old_name_is_told_apart_from_the_file() -> None:
    (job,) = parse_documents(MIGRATED.read_text().split("---\n")[2], "job.yaml")
    with pytest.raises(ManifestError) as error:
        parse_job(job, "job.yaml", ["algorithm.clip.low=0.1"])
    assert str(error.value) == (
        "--set algorithm.clip.low=0.1: spec.algorithm.clip.low is spec.algorithm.loss.clip.low "
        "since v0.2; `sluice migrate-manifest FILE` rewrites the file"
    )


def test_other_faults_of_an_old_manifest_are_told_too() -> None:
    (job,) = parse_documents(OLD.read_text().split("---\n")[2], "job.yaml")
    job["spec"]["trainer"]["stepz"] = 4
    with pytest.raises(ManifestError, match=r"spec\.trainer\.stepz: unknown field; did you mean"):
        parse_job(job, "job.yaml")


def test_explain_knows_an_old_name() -> None:
    with pytest.raises(ManifestError, match=r"^spec\.algorithm\.clip is spec\.algorithm\.loss"):
        explained("algorithm.clip")


def test_an_api_server_refuses_old_names_with_the_new_ones() -> None:
    version = custom_resource_definition(RLJOB)["spec"]["versions"][0]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    rules = {
        f"{group}{rule['fieldPath']}": rule["message"]
        for group in ("algorithm", "trainer", "failurePolicy")
        for rule in spec[group]["x-kubernetes-validations"]
        if "migrate-manifest" in rule["message"]
    }
    assert rules == {
        **{
            field.old: field.sentence(None)
            for field in RENAMED
            if field.old.count(".") == 1 and field.old != "algorithm.loss"
        },
        "failurePolicy.rolloutBackoff": "spec.failurePolicy.rolloutBackoff.baseSeconds is "
        "spec.failurePolicy.rolloutBackoffSeconds since v0.2; `sluice migrate-manifest FILE` "
        "rewrites the file",
    }
