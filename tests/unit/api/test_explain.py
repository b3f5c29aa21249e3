"""`sluice explain`: a field, from the API's own types."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from sluice.api import ManifestError
from sluice.api.changes import CONTINUED, MUTABLE
from sluice.api.explain import completions, explained
from sluice_cli.main import app


def test_a_field_of_a_number() -> None:
    assert explained("trainer.optimizer.beta2").text() == (
        "spec.trainer.optimizer.beta2\n"
        "  type     number\n"
        "  default  0.95\n"
        "  limit    at least 0\n"
        "  limit    less than 1\n"
        "  changes  before its pods start\n"
        "\n"
        "Adam's decay of the gradients' squares."
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
def test_a_field_is_named_as_one_likes(path: str, field: str) -> None:
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
def test_it_tells_when_a_field_may_change(path: str, changes: str) -> None:
    assert explained(path).changes == changes


@pytest.mark.parametrize("path", [*CONTINUED, *MUTABLE])
def test_every_field_that_may_change_is_one(path: str) -> None:
    assert explained(path).field == f"spec.{path}"


def test_what_is_in_a_field_is_listed_with_its_rules() -> None:
    trainer = explained("trainer")
    assert ("steps", "integer") in [(name, kind) for name, kind, _ in trainer.children]
    assert "steps: exactly one of steps and epochs must be set" in trainer.rules
    assert "  schedule       constant | linear | cosine" in explained("trainer.optimizer").text()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("trainer.step", "spec.trainer.step: there is no such field; did you mean steps?"),
        (
            "trainer.steps.more",
            "spec.trainer.steps.more: there is no such field; spec.trainer.steps",
        ),
    ],
)
def test_an_unknown_field_is_refused(path: str, message: str) -> None:
    with pytest.raises(ManifestError) as raised:
        explained(path)
    assert str(raised.value).startswith(message)


def test_fields_are_completed() -> None:
    assert completions("trainer.optimizer.wa") == ["trainer.optimizer.warmupSteps"]
    assert completions("stat") == ["status"]
    assert completions("no.such") == []


def test_the_command_answers_programs() -> None:
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
