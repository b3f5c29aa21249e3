"""Fields that name files are marked in their types, and found by their marks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

from sluice.api.job import RLJobSpec
from sluice.api.schema.base import Model
from sluice.api.schema.crd import schema_of
from sluice.api.schema.paths import (
    ModelPath,
    UserFunction,
    command_word,
    fields,
    marked,
    rewritten,
    volume_of,
)
from sluice.api.schema.reference import fields_of

# A spec that sets every field that names a file, and is of no other use.
EVERY_PATH: dict[str, Any] = {
    "model": {"path": "m1", "referencePath": "m2", "volume": {"hostPath": {"path": "/models"}}},
    "data": {
        "prompts": [
            {"path": "d1.jsonl@[0:9]", "function": "f1.py:f"},
            {"source": {"function": "f2.py:f", "args": {"path": "left/alone"}}},
        ]
    },
    "rollout": {
        "dynamicFilter": "f3.py:f",
        "function": "f4.py:f",
        "hooks": {"beforeReward": "f5.py:f", "afterReward": "f6.py:f"},
        "speculative": {"algorithm": "draft", "model": "p1"},
        "environment": {
            "command": ["w1", "w2"],
            "verifiers": {"python": "w3"},
            "openenv": {"function": "f13.py:f"},
            "gym": {"make": "f14.py:f", "function": "f15.py:f", "python": "w5"},
            "verifier": {"command": ["w4"]},
        },
    },
    "reward": {"function": "f7.py:f", "model": {"url": "http://rm", "tokenizer": "t1"}},
    "algorithm": {
        "function": "f8.py:f",
        "critic": {"modelPath": "m3"},
        "distillation": {"teacher": {"path": "m4"}},
        "loss": {"function": "f9.py:f"},
    },
    "evaluation": {
        "datasets": [
            {
                "path": "d2.jsonl",
                "source": {"function": "f10.py:f"},
                "function": "f11.py:f",
                "reward": {"function": "f12.py:f", "model": {"tokenizer": "t2"}},
            }
        ],
        "heldOut": [
            {"path": "d3.jsonl", "source": {"function": "f17.py:f"}, "function": "f18.py:f"}
        ],
    },
    "trainer": {
        "lora": {"from": "a1"},
        "hooks": {
            "init": "f19.py:f",
            "beforeLogProbs": "f20.py:f",
            "beforeTrainStep": "f21.py:f",
        },
    },
    "telemetry": {"trackers": [{"function": "f16.py:C", "python": "w6"}]},
    "debug": {"replay": "r1"},
}

ALL = [
    ("spec.model.path", "model", "m1"),
    ("spec.model.referencePath", "model", "m2"),
    ("spec.data.prompts[0].path", "data", "d1.jsonl@[0:9]"),
    ("spec.data.prompts[1].source.function", "function", "f2.py:f"),
    ("spec.data.prompts[0].function", "function", "f1.py:f"),
    ("spec.rollout.speculative.model", "draft", "p1"),
    ("spec.rollout.dynamicFilter", "function", "f3.py:f"),
    ("spec.rollout.function", "function", "f4.py:f"),
    ("spec.rollout.environment.command[0]", "word", "w1"),
    ("spec.rollout.environment.command[1]", "word", "w2"),
    ("spec.rollout.environment.verifiers.python", "word", "w3"),
    ("spec.rollout.environment.openenv.function", "function", "f13.py:f"),
    ("spec.rollout.environment.gym.make", "function", "f14.py:f"),
    ("spec.rollout.environment.gym.function", "function", "f15.py:f"),
    ("spec.rollout.environment.gym.python", "word", "w5"),
    ("spec.rollout.environment.verifier.command[0]", "word", "w4"),
    ("spec.rollout.hooks.beforeReward", "function", "f5.py:f"),
    ("spec.rollout.hooks.afterReward", "function", "f6.py:f"),
    ("spec.reward.function", "function", "f7.py:f"),
    ("spec.reward.model.tokenizer", "tokenizer", "t1"),
    ("spec.algorithm.function", "function", "f8.py:f"),
    ("spec.algorithm.loss.function", "function", "f9.py:f"),
    ("spec.algorithm.critic.modelPath", "model", "m3"),
    ("spec.algorithm.distillation.teacher.path", "model", "m4"),
    ("spec.trainer.lora.from", "adapter", "a1"),
    ("spec.trainer.hooks.init", "function", "f19.py:f"),
    ("spec.trainer.hooks.beforeLogProbs", "function", "f20.py:f"),
    ("spec.trainer.hooks.beforeTrainStep", "function", "f21.py:f"),
    ("spec.evaluation.datasets[0].path", "data", "d2.jsonl"),
    ("spec.evaluation.datasets[0].source.function", "function", "f10.py:f"),
    ("spec.evaluation.datasets[0].function", "function", "f11.py:f"),
    ("spec.evaluation.datasets[0].reward.function", "function", "f12.py:f"),
    ("spec.evaluation.datasets[0].reward.model.tokenizer", "tokenizer", "t2"),
    ("spec.evaluation.heldOut[0].path", "data", "d3.jsonl"),
    ("spec.evaluation.heldOut[0].source.function", "function", "f17.py:f"),
    ("spec.evaluation.heldOut[0].function", "function", "f18.py:f"),
    ("spec.telemetry.trackers[0].function", "function", "f16.py:C"),
    ("spec.telemetry.trackers[0].python", "word", "w6"),
    ("spec.debug.replay", "rollouts", "r1"),
]

# Kinds that spec.model.volume holds.
HELD = ("model", "draft", "adapter", "tokenizer")
# Texts whose descriptions speak of files, although they name none.
UNMARKED = {
    "spec.data.prompts[].name": "a name in metrics",
    "spec.evaluation.datasets[].name": "a name in metrics",
    "spec.evaluation.heldOut[].name": "a name in metrics",
    "spec.weightSync.store.uri": "a place of the trainer and the workers, which no volume holds",
}
FILE_WORDS = re.compile(
    r"\b(path|file|files|directory|directories|checkpoint|tokenizer|function|\.py)\b", re.I
)


def test_every_path_of_a_spec_is_known_by_field_and_kind() -> None:
    assert [(path.field, path.kind, path.value) for path in marked(RLJobSpec, EVERY_PATH)] == ALL


def test_the_spec_above_sets_every_annotated_field() -> None:
    annotated = {f"spec.{'.'.join(parts)}".replace(".[]", "[]") for parts, _ in fields(RLJobSpec)}
    assert {re.sub(r"\[\d+\]", "[]", field) for field, _, _ in ALL} == annotated


def test_a_path_is_replaced_and_nothing_else() -> None:
    before = json.dumps(EVERY_PATH)
    after = rewritten(RLJobSpec, EVERY_PATH, lambda path: f"/here/{path.value}")
    assert [path.value for path in marked(RLJobSpec, after)] == [
        f"/here/{value}" for _, _, value in ALL
    ]
    assert rewritten(RLJobSpec, after, lambda path: path.value.removeprefix("/here/")) == EVERY_PATH
    assert json.dumps(EVERY_PATH) == before


def test_only_what_a_volume_can_hold_is_relative_to_one() -> None:
    held = [path.field for path in marked(RLJobSpec, EVERY_PATH) if volume_of(path, EVERY_PATH)]
    assert held == [field for field, kind, _ in ALL if kind in HELD]


def test_a_word_of_a_command_is_a_file_if_one_exists(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "python").symlink_to("real")
    (tmp_path / "data").mkdir()
    words = ["python", "./real", "data", "--fast", "/bin/sh", "x" * 5000, "a\0b"]
    resolved = [f"{tmp_path}/python", f"{tmp_path}/real", *words[2:]]
    assert [command_word(word, tmp_path) for word in words] == resolved


@pytest.mark.parametrize("spec", [
    {},
    {"model": None, "data": {"prompts": None}},
    {"model": "text", "data": {"prompts": [None, 3, {"path": None}]}, "reward": []},
], ids=["nothing", "nulls", "other types"])  # fmt: skip
def test_values_of_the_wrong_type_are_left_alone(spec: dict[str, Any]) -> None:
    assert marked(RLJobSpec, spec) == []
    assert rewritten(RLJobSpec, spec, lambda _: "never") == spec


class _Inner(Model):
    several: Annotated[list[ModelPath], "bounded"] | None = None


class _Outer(Model):
    inner: list[_Inner] | None = None
    own: UserFunction | None = None


def test_lists_of_paths_and_nested_lists_are_walked() -> None:
    spec = {"inner": [{"several": ["a", "b"]}, {}], "own": "x.py:f"}
    paths = [(path.field, path.value) for path in marked(_Outer, spec)]
    assert paths == [
        ("spec.inner[0].several[0]", "a"),
        ("spec.inner[0].several[1]", "b"),
        ("spec.own", "x.py:f"),
    ]


def test_a_text_that_is_described_as_a_path_is_annotated() -> None:
    """A new field that names a file must have a type of sluice.api.schema.paths, or a reason
    in UNMARKED.
    """
    spec = schema_of(RLJobSpec)
    annotated = {f"spec.{'.'.join(parts)}".replace(".[]", "[]") for parts, _ in fields(RLJobSpec)}
    speaking = {
        field
        for field, text in _texts(spec, "spec")
        if FILE_WORDS.search(f"{_words(field)} {text}")
    }
    assert speaking - annotated == set(UNMARKED)


def _words(field: str) -> str:
    """The last name of a field, `referencePath`, as words."""
    return re.sub(r"([A-Z])", r" \1", field.rpartition(".")[2])


def _texts(schema: dict[str, Any], at: str) -> Iterator[tuple[str, str]]:
    """(field, description) of all texts that may be anything: neither one of a few words nor an
    address."""
    if (
        schema.get("type") == "string"
        and "enum" not in schema
        and not schema.get("pattern", "").startswith("^http")
    ):
        yield at, schema.get("description", "")
    if "items" in schema:
        yield from _texts(schema["items"], f"{at}[]")
    for name, child in fields_of(schema).items():
        yield from _texts(child, f"{at}.{name}")


def test_no_other_module_lists_the_fields_by_hand() -> None:
    root = Path(__file__).parents[3]
    rooms = [root / "cli", root / "client", root / "operator"]
    texts = {path: path.read_text() for room in rooms for path in room.rglob("*.py")}
    assert [
        path
        for path, text in texts.items()
        if re.search(r'"(referencePath|modelPath|replay)"', text)
    ] == []
