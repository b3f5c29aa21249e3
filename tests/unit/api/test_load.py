"""Bad manifests get one message that names file, line and field; good ones load with their overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.api import ManifestError, RLJob, load_job, manifest
from sluice.api.base import quantity_value

MANIFEST = """\
apiVersion: sluice.dev/v1alpha1
kind: RLJob
metadata:
  name: tiny
spec:
  model: {path: model, init: random}
  data:
    prompts:
      - path: train.jsonl
  reward:
    type: exact_match
  rollout:
    batchSize: 4
    samplesPerPrompt: 6
  trainer:
    steps: 10
    optimizer: {lr: 1e-6}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    return path


def test_exponents_are_numbers_as_in_yaml_1_2(file: Path) -> None:
    assert load_job(file).spec.trainer.optimizer.lr == 1e-6


def test_overrides_replace_create_and_append(file: Path) -> None:
    overrides = ["trainer.steps=3", "spec.rollout.sampling.topP=0.5", "data.prompts[1].path=more.jsonl", "suspend=true"]
    spec = load_job(file, overrides).spec
    assert (spec.trainer.steps, spec.rollout.sampling.top_p, spec.data.prompts[1].path, spec.suspend) == (
        3,
        0.5,
        "more.jsonl",
        True,
    )


def test_a_manifest_survives_the_round_trip(file: Path) -> None:
    job = load_job(file)
    assert RLJob.model_validate(manifest(job)) == job


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stpes=1", ":15: spec.trainer.stpes: unknown field; did you mean steps?"),
        ("trainer.steps=many", ":16: spec.trainer.steps: Input should be a valid integer"),
        ("trainer.stepsPerBatch=5", "spec.trainer.stepsPerBatch: batchSize x samplesPerPrompt sequences (4 x 6 = 24)"),
        ("trainer.epochs=1", "spec.trainer.steps: exactly one of steps and epochs must be set"),
        ("rollout.maxStaleness=1", "spec.rollout.maxStaleness: maxStaleness > 0 needs mode: async"),
        ("rollout.mode=async", "spec.rollout.maxStaleness: mode: async needs maxStaleness of at least 1"),
        ("reward.url=http://judge", ":10: spec.reward: exactly one of type, function, url and model must be set"),
        (
            "reward.model={url: http://judge}",
            ":10: spec.reward: exactly one of type, function, url and model must be set",
        ),
        ("reward.type=maths", "spec.reward.type: Input should be 'boxed_exact_match'"),
        ("algorithm.kl={coef: 0.1, lossCoef: 0.1}", "spec.algorithm.kl.lossCoef: coef (in the reward) and lossCoef"),
        ("trainer.parallelism.tensor=3", "spec.trainer.parallelism: nodes x processes a node (1)"),
        ("trainer.parallelism.expert=2", "parallelism.expert: nodes x processes a node / pipeline (1) must"),
        ("trainer.parallelism.virtualPipeline=2", "parallelism.virtualPipeline: virtualPipeline needs pipeline of at"),
        ("trainer.parallelism.virtualPipeline=1", "parallelism.virtualPipeline: Input should be greater than or equal"),
        ("rollout.sampling.temperature=0", "spec.rollout.sampling.temperature: Input should be greater than 0"),
        ("metadata.name=Tiny", ":4: metadata.name: String should match pattern"),
        ("buffer.storage.size=20Gigs", "spec.buffer.storage.size"),
        ("kind=Job", "expected apiVersion sluice.dev/v1alpha1, kind RLJob; found"),
        ("data.prompts[5].path=x", "'5' is not an index into a list of 1"),
        ("trainer", "expected path=value"),
    ],
)
def test_one_message_names_the_field_and_the_fix(file: Path, override: str, message: str) -> None:
    with pytest.raises(ManifestError) as raised:
        load_job(file, [override])
    assert message in str(raised.value)


def test_every_problem_is_listed(file: Path) -> None:
    with pytest.raises(ManifestError) as raised:
        load_job(file, ["trainer.steps=0", "rollout.batchSize=none", "nothing=1"])
    assert len(str(raised.value).splitlines()) == 3


def test_malformed_yaml_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("kind: RLJob\nspec: {a: [1, 2}\n")
    with pytest.raises(ManifestError, match=r"job\.yaml:2:\d+: not valid YAML"):
        load_job(path)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"none\.yaml: No such file"):
        load_job(tmp_path / "none.yaml")


@pytest.mark.parametrize(("text", "value"), [("512Mi", 2**29), ("1.5G", 1.5e9), ("500m", 0.5), ("2", 2), ("1e3", 1000)])
def test_quantities(text: str, value: float) -> None:
    assert quantity_value(text) == pytest.approx(value)
