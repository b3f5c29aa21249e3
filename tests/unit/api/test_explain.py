"""`sluice explain`: a field, from the API's own types."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from sluice.api import ManifestError
from sluice.api.schema.explain import ExplainedField, completions, explained, find
from sluice.api.schema.mutability import CONTINUED, MUTABLE
from sluice_cli.main import app


def test_a_number_is_explained_with_default_and_limits() -> None:
    assert explained("trainer.optimizer.beta2").text() == (
        "spec.trainer.optimizer.beta2\n"
        "  type     number\n"
        "  default  0.95\n"
        "  limit    at least 0\n"
        "  limit    less than 1\n"
        "  changes  before its pods start\n"
        "\n"
        "Decay of Adam's mean of the squared gradients."
    )


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("trainer", "spec.trainer"),
        ("spec.trainer", "spec.trainer"),
        ("data.prompts[0].path", "spec.data.prompts[].path"),
        ("data.prompts.path", "spec.data.prompts[].path"),
        ("status.conditions.type", "status.conditions[].type"),
        ("spec", "spec"),
    ],
)
def test_a_field_is_found_with_or_without_spec_and_indices(path: str, field: str) -> None:
    assert explained(path).field == field


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("rollout.replicas", "at any time"),
        ("failurePolicy.maxRestarts", "at any time"),
        (
            "trainer.steps",
            "before its pods start; on this machine between two runs of `sluice run`",
        ),
        ("trainer.optimizer", "before its pods start; some of its fields also later"),
        ("model.path", "before its pods start"),
        ("status.step", ""),
    ],
)
def test_an_explanation_says_when_a_field_may_change(path: str, changes: str) -> None:
    assert explained(path).changes == changes


@pytest.mark.parametrize("path", [*CONTINUED, *MUTABLE])
def test_every_field_that_may_change_exists(path: str) -> None:
    assert explained(path).field == f"spec.{path}"


def test_an_object_is_explained_with_its_fields_and_rules() -> None:
    trainer = explained("trainer")
    assert ("steps", "integer") in [(child.name, child.type) for child in trainer.children]
    assert "steps: exactly one of steps and epochs must be set" in trainer.rules
    optimizer = explained("trainer.optimizer").text()
    assert '  schedule       constant | linear | cosine, default "constant"\n' in optimizer
    assert "  path             string, required\n" in explained("model").text()


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "lr",
            ["spec.algorithm.critic.lr", "spec.trainer.mtp.lr", "spec.trainer.optimizer.lr"],
        ),
        ("trainer.lr", ["spec.trainer.mtp.lr", "spec.trainer.optimizer.lr"]),
        ("batchSize", ["spec.rollout.batchSize"]),
        ("spec.trainer.steps", ["spec.trainer.steps"]),
    ],
)
def test_a_field_is_found_by_its_name_alone(text: str, fields: list[str]) -> None:
    result = find(text)
    assert [match.field for match in getattr(result, "fields", [result])] == fields


def test_a_field_that_is_in_several_places_is_listed_with_its_paths() -> None:
    lines = CliRunner().invoke(app, ["explain", "lr"]).stdout.splitlines()
    assert lines[0] == "lr is a field in 3 places:"
    assert "  spec.trainer.optimizer.lr  number, default 1e-06" in lines
    places = json.loads(CliRunner().invoke(app, ["explain", "lr", "-o", "json"]).stdout)
    assert [place["default"] for place in places] == [1e-05, None, 1e-06]


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("rlenginepool.maxAdapters", "at any time"),
        ("RLEnginePool.spec.model.path", "never"),
        ("rlenginepools.status.engines", ""),
        ("maxAdapters", "at any time"),  # no job has such a field
    ],
)
def test_fields_of_a_pool_are_explained_too(text: str, changes: str) -> None:
    field = find(text)
    assert isinstance(field, ExplainedField)
    assert field.field.startswith("rlenginepool.")
    assert field.changes == changes


def test_a_name_that_no_field_has_is_refused() -> None:
    result = CliRunner().invoke(app, ["explain", "tariner.lr"])
    assert result.exit_code == 2
    assert "spec.tariner: no such field; did you mean trainer?" in result.stderr


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("trainer.step", "spec.trainer.step: no such field; did you mean steps?"),
        (
            "trainer.steps.more",
            "spec.trainer.steps.more: no such field; spec.trainer.steps",
        ),
    ],
)
def test_an_unknown_field_is_refused(path: str, message: str) -> None:
    with pytest.raises(ManifestError) as raised:
        explained(path)
    assert str(raised.value).startswith(message)


def test_field_paths_are_completed() -> None:
    assert completions("trainer.optimizer.wa") == ["trainer.optimizer.warmupSteps"]
    assert completions("stat") == ["status"]
    assert completions("no.such") == []


def test_the_command_prints_json() -> None:
    result = CliRunner().invoke(app, ["explain", "model.init", "-o", "json"])
    facts = json.loads(result.stdout)
    assert (facts["type"], facts["default"], facts["required"]) == (
        "pretrained | random",
        "pretrained",
        False,
    )
    assert json.loads(CliRunner().invoke(app, ["explain", "model.path", "-o", "json"]).stdout)[
        "required"
    ]
