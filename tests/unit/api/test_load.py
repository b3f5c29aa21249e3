"""Bad manifests get one message that names file, line and field; good ones load with their
overrides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.api import ManifestError, RLJob, load_job, manifest
from sluice.api.schema import problems
from sluice.api.schema.base import quantity_value

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
    overrides = [
        "trainer.steps=3",
        "spec.rollout.sampling.topP=0.5",
        "data.prompts[1].path=more.jsonl",
        "suspend=true",
    ]
    spec = load_job(file, overrides).spec
    assert (
        spec.trainer.steps,
        spec.rollout.sampling.top_p,
        spec.data.prompts[1].path,
        spec.suspend,
    ) == (
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
        (
            "trainer.stpes=1",
            "--set trainer.stpes=1: spec.trainer.stpes: unknown field; did you mean steps?",
        ),
        (
            "trainer={stpes: 1}",
            "--set trainer={stpes: 1}: spec.trainer.stpes: unknown field; did you mean steps?",
        ),
        (
            "trainer.template={spec: {hostNetwrk: true}}",
            "--set trainer.template={spec: {hostNetwrk: true}}: spec.trainer.template.spec."
            "hostNetwrk: no such field of a pod's spec; did you mean hostNetwork?",
        ),
        (
            "rollout.samples_per_prompt=2",
            "spec.rollout.samples_per_prompt: unknown field; did you mean samplesPerPrompt?",
        ),
        (
            "trainer.steps=many",
            "--set trainer.steps=many: spec.trainer.steps: expected a whole number, found 'many'",
        ),
        ("trainer.steps=1.5", "spec.trainer.steps: expected a whole number, found 1.5"),
        (
            "trainer.stepsPerBatch=5",
            "spec.trainer.stepsPerBatch: batchSize x samplesPerPrompt sequences (4 x 6 = 24)",
        ),
        (
            "trainer.epochs=1",
            ":16: spec.trainer.steps: exactly one of steps and epochs must be set; "
            "--set trainer.steps=null takes steps out",
        ),
        (
            "rollout.maxStaleness=1",
            "spec.rollout.maxStaleness: maxStaleness above 0 needs mode: async",
        ),
        (
            "rollout.mode=async",
            "spec.rollout.maxStaleness: mode: async needs maxStaleness of at least 1",
        ),
        (
            "reward.url=http://judge",
            ":10: spec.reward: exactly one of type, function, url and model must be set; "
            "--set reward.type=null takes type out",
        ),
        (
            "reward.model={url: http://judge}",
            ":10: spec.reward: exactly one of type, function, url and model must be set",
        ),
        ("reward.type=maths", "'random' or 'swe', found 'maths'; did you mean math?"),
        ("reward.type=", "spec.reward.type: expected 'boxed_exact_match'"),
        (
            "reward={function: judge}",
            "spec.reward.function: expected a Python function as package.module.name or",
        ),
        (
            "rollout.dynamicFilter=nonzero",
            "dynamicFilter: expected nonzero_std, or a Python function as",
        ),
        ("reward=math", "--set reward=math: spec.reward: expected an object, found 'math'"),
        ("rollout.sampling.stop=x", "spec.rollout.sampling.stop: expected a list, found 'x'"),
        (
            "algorithm.kl={coef: 0.1, lossCoef: 0.1}",
            "spec.algorithm.kl.lossCoef: coef (in the reward) and lossCoef",
        ),
        (
            "trainer.parallelism.tensor=3",
            "spec.trainer.parallelism: nodes x processes of a node (1)",
        ),
        (
            "trainer.parallelism.expert=2",
            "parallelism.expert: nodes x processes of a node / pipeline (1) must",
        ),
        (
            "trainer.parallelism.virtualPipeline=2",
            "parallelism.virtualPipeline: virtualPipeline needs pipeline of at",
        ),
        (
            "trainer.parallelism.virtualPipeline=1",
            "parallelism.virtualPipeline: expected at least 2, found 1",
        ),
        (
            "rollout.sampling.temperature=0",
            "spec.rollout.sampling.temperature: expected more than 0",
        ),
        (
            "metadata.name=Tiny",
            "--set metadata.name=Tiny: metadata.name: expected small letters, digits and '-'; ",
        ),
        (
            "buffer.storage.size=20Gigs",
            "spec.buffer.storage.size: '20Gigs' is not a quantity such as 500m, 2, 512Mi",
        ),
        (
            "buffer.storage.size=[1]",
            "spec.buffer.storage.size: expected a text or expected a whole number",
        ),
        (
            "trainer.steps.more=1",
            "--set trainer.steps.more=1: spec.trainer.steps is 10, which has no fields",
        ),
        ("trainer.steps.more.still=1", "spec.trainer.steps is 10, which has no fields"),
        ("kind=Job", "expected apiVersion sluice.dev/v1alpha1, kind RLJob; found"),
        ("data.prompts[5].path=x", "'5' is not an index into a list of 1"),
        ("trainer", "expected path=value"),
    ],
)
def test_one_message_names_the_field_and_the_fix(file: Path, override: str, message: str) -> None:
    with pytest.raises(ManifestError) as raised:
        load_job(file, [override])
    assert message in str(raised.value)


def test_an_attribute_of_the_python_class_is_not_a_field(file: Path) -> None:
    file.write_text(MANIFEST.replace("samplesPerPrompt", "samples_per_prompt"))
    with pytest.raises(ManifestError) as raised:
        load_job(file)
    assert (
        ":14: spec.rollout.samples_per_prompt: unknown field; did you mean samplesPerPrompt?"
        in (str(raised.value))
    )


def test_an_override_with_null_removes_a_field(file: Path) -> None:
    spec = load_job(file, ["trainer.steps=null", "trainer.epochs=2"]).spec
    assert (spec.trainer.steps, spec.trainer.epochs) == (None, 2)


def test_every_problem_is_listed(file: Path) -> None:
    with pytest.raises(ManifestError) as raised:
        load_job(file, ["trainer.steps=0", "rollout.batchSize=none", "nothing=1"])
    assert len(str(raised.value).splitlines()) == 3


def test_malformed_yaml_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("kind: RLJob\nspec: {a: [1, 2}\n")
    with pytest.raises(ManifestError, match=r"job\.yaml:2:\d+: not valid YAML"):
        load_job(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: \x01\n", "not valid YAML: unacceptable character"),
        ("kind: RLJob\nmetadata:\n---\nkind: RLJob\n", "2 RLJobs in one file"),
        ("- kind: RLJob\n", "expected an object with apiVersion"),
        ("# nothing\n", "the file is empty"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError) as raised:
        load_job(path)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def patterns(node: Any) -> Iterator[str]:
    """Every `pattern` of a JSON schema."""
    if isinstance(node, dict):
        if isinstance(node.get("pattern"), str):
            yield node["pattern"]
        for child in node.values():
            yield from patterns(child)
    elif isinstance(node, list):
        for child in node:
            yield from patterns(child)


def test_every_pattern_of_a_field_has_words() -> None:
    schema = RLJob.model_json_schema()
    del schema["$defs"]["Condition"]  # users do not write a status
    assert set(patterns(schema)) == set(problems.PATTERNS)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"none\.yaml: No such file"):
        load_job(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "value"), [("512Mi", 2**29), ("1.5G", 1.5e9), ("500m", 0.5), ("2", 2), ("1e3", 1000)]
)
def test_quantities(text: str, value: float) -> None:
    assert quantity_value(text) == pytest.approx(value)
