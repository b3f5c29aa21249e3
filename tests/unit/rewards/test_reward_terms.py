"""Terms of the reward, against their definitions in papers and other projects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sluice.api.groups.reward_terms import RewardTerm, RewardTermType
from sluice.rewards import RewardInput
from sluice.rewards.terms import by_length, has_format, repeated, with_terms


def term(**fields: Any) -> RewardTerm:
    return RewardTerm.model_validate(fields)


@pytest.mark.parametrize(
    ("response", "tags", "opened", "right"),
    [
        pytest.param("<think>a</think>b", ["think"], False, True, id="thought and answer"),
        pytest.param("<think>a</think>", ["think"], False, True, id="no answer"),
        pytest.param("\n<think>\na\n</think>\nb", ["think"], False, True, id="lines"),
        pytest.param("a</think>b", ["think"], True, True, id="opened by the template"),
        pytest.param("<think>a</think>b", ["think"], True, False, id="opened twice"),
        pytest.param("a</think>b", ["think"], False, False, id="never opened"),
        pytest.param("<think>a", ["think"], False, False, id="never closed"),
        pytest.param("So: <think>a</think>b", ["think"], False, False, id="text before"),
        pytest.param("<think>a</think>b</think>", ["think"], False, False, id="closed twice"),
        pytest.param("</think>a<think>", ["think"], False, False, id="closed first"),
        pytest.param(
            "<think>a</think>\n<answer>b</answer>", ["think", "answer"], False, True, id="two tags"
        ),
        pytest.param(
            "<think>a</think> x <answer>b</answer>",
            ["think", "answer"],
            False,
            False,
            id="text between",
        ),
        pytest.param(
            "<answer>b</answer><think>a</think>", ["think", "answer"], False, False, id="order"
        ),
    ],
)
def test_formats(response: str, tags: Sequence[str], opened: bool, right: bool) -> None:
    assert has_format(response, tags, opened=opened) is right


@pytest.mark.parametrize(
    ("tokens", "ngram", "share"),
    [
        pytest.param([1, 2, 3, 4], 2, 0, id="all new"),
        pytest.param([5, 5, 5, 5, 5], 2, 3 / 4, id="one token"),
        pytest.param([1, 2, 1, 2, 1], 2, 2 / 4, id="two in turn"),
        pytest.param([1], 2, 0, id="too short"),
        pytest.param([], 1, 0, id="nothing"),
    ],
)
def test_repetitions(tokens: list[int], ngram: int, share: float) -> None:
    assert repeated(tokens, ngram) == pytest.approx(share)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_repetitions_are_those_of_a_loop(tokens: list[int], ngram: int) -> None:
    seen: list[list[int]] = []
    again = 0
    for i in range(len(tokens) - ngram + 1):
        again += tokens[i : i + ngram] in seen
        seen.append(tokens[i : i + ngram])
    assert repeated(tokens, ngram) == pytest.approx(again / len(seen) if seen else 0)


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("length", [0, 1, 50, 99, 100])
def test_the_cosine_is_open_r1s(length: int, right: bool) -> None:
    """open-r1's `get_cosine_scaled_reward`: 1 to 0 for right responses, -1 to 0 for wrong ones."""
    if right:
        least, most = 0.0, 1.0
    else:
        least, most = 0.0, -1.0  # it swaps them
    theirs = least + 0.5 * (most - least) * (1 + math.cos(length / 100 * math.pi))
    assert float(right) + by_length(length, 100, right=right) == pytest.approx(theirs)


def test_beyond_the_longest_nothing_changes() -> None:
    assert by_length(500, 100, right=True) == by_length(100, 100, right=True) == -1
    assert by_length(500, 100, right=False) == pytest.approx(0)


def test_terms_are_weighted_and_kept() -> None:
    sample = RewardInput("p", "<think>a</think>b", tokens=[9, 9, 5, 5, 5, 5], response_length=4)
    terms = [
        term(type="format", weight=0.5),
        term(type="repetition", weight=2.0, ngram=1),
        term(type="length", weight=0.1, longest=8),
    ]
    reward, parts = with_terms((1.0, {"acc": 1.0}), sample, terms)
    assert reward == pytest.approx(1 + 0.5 * 1 - 2 * 0.75 - 0.1 * 0.5)
    assert parts == pytest.approx(
        {"score": 1, "acc": 1, "format": 1, "repetition": -0.75, "length": -0.5}
    )
    assert "accuracy" in with_terms((1.0, {}), sample, terms, "accuracy")[1]


def test_every_term_has_a_value() -> None:
    for kind in get_args(RewardTermType):
        fields = {"longest": 4} if kind == "length" else {}
        _, parts = with_terms((0.0, {}), RewardInput("p", "r"), [term(type=kind, **fields)])
        assert set(parts) == {"score", kind}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "length"}, "longest belongs to the term length"),
        ({"type": "format", "longest": 3}, "longest belongs to the term length"),
        ({"type": "length", "longest": 3, "tags": ["a"]}, "only the term format looks at tags"),
        ({"type": "repetition", "opened": True}, "only the term format looks at tags"),
        ({"type": "format", "ngram": 3}, "only the term repetition has n-grams"),
    ],
    ids=["no longest", "longest of a format", "tags of a length", "opened", "n-gram of a format"],
)
def test_invalid_terms_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        term(**fields)
