"""Choice of a row's reward, valid return values, and rewards that compare texts."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from sluice.api.groups.data import RewardType
from sluice.rewards import RewardError, RewardInput, registry
from sluice.rewards.builtin.contains import contains
from sluice.rewards.builtin.exact_match import exact_match
from sluice.rewards.builtin.f1 import f1
from sluice.rewards.builtin.random import by_chance
from sluice.rewards.types import read_value


def sample(response: str, label: Any = None, **metadata: Any) -> RewardInput:
    return RewardInput(prompt="p", response=response, label=label, metadata=metadata)


@pytest.mark.parametrize(
    ("reward", "response", "label", "expected"),
    [
        (exact_match, " 42\n", "42", 1.0),
        (exact_match, "42", 42, 1.0),
        (exact_match, "421", "42", 0.0),
        (exact_match, "", "42", 0.0),
        (contains, "it is 42.", "42", 1.0),
        (contains, "it is 4 2", "42", 0.0),
        (f1, "The cat sat", "a cat sat", 1.0),
        (f1, "cat", "cat sat", 2 / 3),
        (f1, "dog", ["cat", "dog"], 1.0),
        (f1, "", "cat", 0.0),
        (f1, "yes", "Yes.", 1.0),
        (f1, "yes it is", "yes", 0.0),
        (f1, "no", "no way", 0.0),
    ],
)
def test_built_in(reward: Any, response: str, label: Any, expected: float) -> None:
    assert reward(sample(response, label)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "reward", [exact_match, contains, f1], ids=["exact_match", "contains", "f1"]
)
@pytest.mark.parametrize("label", [None, {"a": 1}], ids=str)
def test_a_row_without_a_label_is_named(reward: Any, label: Any) -> None:
    with pytest.raises(
        RewardError, match=f"^label: {reward.__name__} needs a text or a number, the row has"
    ):
        reward(sample("r", label))


def test_chance_gives_0_and_1() -> None:
    assert {by_chance(sample("r")) for _ in range(100)} == {0.0, 1.0}


def test_every_type_of_the_api_has_a_reward() -> None:
    for name in get_args(RewardType):
        if name != registry.BY_SOURCE:
            registry.choose(sample("r"), name)
    assert {*registry.IN_PROCESS, *registry.IN_POOL} <= set(get_args(RewardType))


@pytest.mark.parametrize(
    ("metadata", "default", "expected"),
    [
        ({}, "math", "math"),
        ({"rm_type": "f1"}, "math", "f1"),
        ({"rm_type": " dapo "}, None, "dapo"),
        ({}, None, None),
        ({"rm_type": "remote_rm"}, "math", "remote_rm"),
        ({"data_source": "openai/gsm8k"}, "math", "math"),
        ({"data_source": "openai/gsm8k"}, "data_source", "gsm8k"),
        ({"data_source": "lighteval/MATH"}, "data_source", "math"),
        ({"data_source": "aime_2024"}, "data_source", "dapo"),
        ({"data_source": "codeforces"}, "data_source", "code"),
        ({"data_source": "openai/gsm8k", "rm_type": "math"}, "data_source", "math"),
    ],
    ids=str,
)
def test_which_reward_judges_a_row(
    metadata: dict[str, Any], default: str | None, expected: str | None
) -> None:
    assert registry.choose(sample("r", **metadata), default)[0] == expected


def test_boxed_leaves_only_the_last_box() -> None:
    name, judged = registry.choose(
        sample(r"\boxed{no} so \boxed{the cat}", "cat", rm_type="boxed_f1"), None
    )
    assert (name, judged.response) == ("f1", "the cat")
    assert registry.choose(sample("no box", rm_type="boxed_f1"), None)[1].response == ""


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"rm_type": "nope"},
            "metadata.rm_type: no reward is called 'nope'; there are code, contains",
        ),
        (
            {"rm_type": "data_source", "data_source": "my/own"},
            "data_source: 'my/own' has no reward; those that have",
        ),
    ],
)
def test_an_unknown_reward_is_refused_with_the_existing_names(
    metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        registry.choose(sample("r", **metadata), None)


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ({"points": 1}, None, "without 'score' .points.: set reward.key"),
        ({"score": 1}, "acc", "no number 'acc'; it has score"),
        ("good", None, "expected a number"),
        (None, None, "expected a number"),
        ([1.0, 2.0], None, "expected a number"),
        (float("inf"), None, "expected a finite number"),
        ({"score": 1, "x": float("nan")}, None, "reward part 'x' is nan"),
        (10**400, None, "expected one number"),
        (np.ones(3), None, "expected one number"),
        ({f"part{i}": 1 for i in range(65)}, "part0", "of 65 entries, expected at most 64"),
        ({"x" * 200: 1}, None, "short names"),
        ("x" * 10**6, None, r"'x{199}\.\.\. \(1000002 characters\), expected a number"),
    ],
    ids=[
        "no score",
        "no such part",
        "text",
        "nothing",
        "list",
        "infinite",
        "part is nan",
        "huge",
        "array",
        "many parts",
        "long name",
        "long text",
    ],
)
def test_nonsense_is_refused_with_its_cause(value: Any, key: str | None, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        read_value(value, key)


@pytest.mark.parametrize(
    "value", [0.5, np.float32(0.5), np.array(0.5)], ids=["float", "numpy scalar", "numpy array"]
)
def test_numbers_of_all_kinds_are_taken(value: Any) -> None:
    assert read_value(value, None) == (0.5, {})


def test_the_key_picks_and_the_parts_stay() -> None:
    value = {"score": 1, "acc": False, "note": "x"}
    assert read_value(value, "acc") == (0.0, {"score": 1.0, "acc": 0.0})
    assert read_value(value, None) == (1.0, {"score": 1.0, "acc": 0.0})
