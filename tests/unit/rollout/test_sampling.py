"""Sampling parameters of requests, and names of data sources."""

from __future__ import annotations

import pytest

from sluice.api import EvaluationSampling, PromptSource, Sampling
from sluice_rollout.generate import sampling_params


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/gsm8k.jsonl", "gsm8k"),
        ("/data/gsm8k.jsonl@[0:100]", "gsm8k"),
        ("math.v2.parquet", "math.v2"),
    ],
)
def test_a_source_is_named_after_its_file(path: str, name: str) -> None:
    assert PromptSource(path=path).source_name == name


def test_sampling_parameters_have_sglangs_names() -> None:
    params = sampling_params(
        Sampling(temperature=0.7, top_p=0.9, max_response_tokens=5, stop=["\n"])
    )
    assert params == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 5,
        "stop": ["\n"],
        "skip_special_tokens": True,
    }


def test_evaluation_overrides_what_it_sets_and_nothing_else() -> None:
    params = sampling_params(
        Sampling(temperature=0.7, top_k=9), EvaluationSampling(temperature=0, max_response_tokens=3)
    )
    assert (params["temperature"], params["top_k"], params["max_new_tokens"]) == (0, 9, 3)
