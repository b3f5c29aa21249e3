"""The choice of a token by the engine transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.engines.transformers.server.sampling import (
    RefusedError,
    SamplingParameters,
    choose,
    truncated,
)

LOGITS = torch.tensor([2.0, 1.0, 1.0, -1.0])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.floats(0.01, 1.0), st.integers(-1, 5))
def test_the_most_likely_tokens_stay(top_p: float, top_k: int) -> None:
    probabilities = LOGITS.softmax(-1)
    kept = truncated(probabilities, top_p, top_k)
    assert kept[0] == probabilities[0]
    assert set(kept.tolist()) <= {0.0, *probabilities.tolist()}
    count = int((kept > 0).sum())
    if top_k > 0:
        assert count <= top_k
    elif top_p < 1:
        ordered = probabilities.sort(descending=True).values
        assert float(ordered[:count].sum()) >= top_p - 1e-6
        assert count == 1 or float(ordered[: count - 1].sum()) < top_p + 1e-6


def test_of_equally_likely_tokens_those_with_smaller_numbers_stay() -> None:
    assert truncated(LOGITS.softmax(-1), 1.0, 2).nonzero().flatten().tolist() == [0, 1]


def test_draws_follow_the_scaled_distribution() -> None:
    parameters, source = SamplingParameters(temperature=0.5), generator()
    tokens = [choose(LOGITS, parameters, source)[0] for _ in range(4000)]
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / 4000
    torch.testing.assert_close(shares, (LOGITS / 0.5).softmax(-1), atol=0.03, rtol=0)


def test_temperature_0_is_greedy_and_has_the_log_prob_of_temperature_1() -> None:
    token, log_prob = choose(LOGITS, SamplingParameters(temperature=0), generator())
    assert token == 0
    assert log_prob == pytest.approx(float(LOGITS.log_softmax(-1)[0]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature must be non-negative, found -1"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, found 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, found 0"),
        ({"frequency_penalty": 0.5}, "has nothing for frequency_penalty"),
    ],
)
def test_what_cannot_be_done_is_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        SamplingParameters.read(given)


def test_parameters_without_effect_are_taken() -> None:
    given = {"skip_special_tokens": True, "frequency_penalty": 0.0, "stop": "end", "top_k": 5}
    assert SamplingParameters.read(given) == SamplingParameters(stop=("end",), top_k=5)


@pytest.mark.parametrize(
    "given",
    [
        {"top_k": "5"},
        {"top_k": 2.5},
        {"max_new_tokens": True},
        {"min_new_tokens": "3"},
        {"sampling_seed": "x"},
        {"stop": [1]},
        {"stop_token_ids": ["1"]},
        {"top_p": "0.5"},
        {"temperature": float("nan")},
    ],
    ids=str,
)
def test_values_of_another_kind_are_refused_before_they_reach_other_requests(
    given: dict[str, object],
) -> None:
    with pytest.raises(RefusedError, match="sampling: "):
        SamplingParameters.read(given)
