"""The worker's pure parts: an engine's answers, weight spans, masks, filters, prompts, sampling
parameters."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.api import EvaluationSampling, PromptSource, Sampling
from sluice.engines.http.client import version_number
from sluice.engines.protocol import UNKNOWN_VERSION, EngineError, Generation, PromptRefusedError
from sluice.engines.sglang.client import generation, refusal
from sluice.runtime import user_code
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Sample, SampleGroup, TokenSequence, WeightSpan
from sluice_rollout.generate import sampling_params
from sluice_rollout.submit import mask_off_policy
from sluice_rollout.user_functions import filters


def answer(tokens: int, finish: str = "stop", **more: Any) -> dict[str, Any]:
    entries = [[-float(i), i, None] for i in range(tokens)]
    meta = {
        "weight_version": "5",
        "output_token_logprobs": entries,
        "finish_reason": {"type": finish},
    }
    return {"meta_info": meta | more}


def test_spans_of_an_answer_count() -> None:
    told = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 2}]
    parsed = generation(answer(3, weight_versions=[*told, {"version": "5", "start": 2, "end": 3}]))
    assert parsed == Generation(
        [0, 1, 2], [0.0, -1.0, -2.0], [WeightSpan(3, 0, 2), WeightSpan(5, 2, 3)], "stop", None
    )


@pytest.mark.parametrize(
    ("highest", "dtype"), [(127, np.uint8), (300, np.uint16)], ids=["in a byte", "in two"]
)
def test_experts_of_an_answer_are_a_row_a_token(highest: int, dtype: type) -> None:
    """Of two tokens of a prompt and three of the answer, of which the last went nowhere."""
    ids = np.full((4, 6), 2, np.int32)
    ids[3, 5] = highest
    told: dict[str, Any] = {"routed_experts": base64.b64encode(ids.tobytes()).decode()}
    told |= {"sluice_versions": ["3"] * 3, "prompt_tokens": 2, "completion_tokens": 3}
    parsed = generation(answer(3, **told))
    assert parsed.experts is not None
    assert parsed.experts.dtype == dtype
    np.testing.assert_array_equal(parsed.experts, ids)
    with pytest.raises(EngineError, match="not an answer of SGLang's /generate"):
        generation(answer(3, **told | {"prompt_tokens": 5}))


def test_versions_of_tokens_are_put_together_to_spans() -> None:
    parsed = generation(answer(5, "length", sluice_versions=[None, "3", "3", "4", "4"]))
    assert parsed.spans == [
        WeightSpan(UNKNOWN_VERSION, 0, 1),
        WeightSpan(3, 1, 3),
        WeightSpan(4, 3, 5),
    ]


def test_before_the_first_update_the_name_of_the_weights_counts() -> None:
    assert generation(answer(2, sluice_versions=[None, None])).spans == [WeightSpan(5, 0, 2)]
    unnamed = answer(2, sluice_versions=[None, None], weight_version="default")
    assert generation(unnamed).spans == [WeightSpan(UNKNOWN_VERSION, 0, 2)]


def test_an_answer_without_versions_is_refused_and_without_tokens_needs_none() -> None:
    with pytest.raises(
        EngineError, match=r"does not tell which weights.* set weightSync.enginePlugin to true"
    ):
        generation(answer(3))
    with pytest.raises(EngineError, match="does not tell"):
        generation(answer(3, sluice_versions=["3", "3"]))
    assert generation(answer(0, "abort")) == Generation([], [], [], "abort", None)


def test_what_a_request_had_that_was_aborted_in_the_queue_is_left() -> None:
    assert generation(answer(3, "abort")) == Generation([], [], [], "abort", None)


def test_a_request_that_is_aborted_before_it_begins_is_no_error() -> None:
    text = json.dumps({"error": {"message": "Request 1-0 was aborted"}})
    assert refusal(400, text) == Generation([], [], [], "abort", None)


@pytest.mark.parametrize(
    ("status", "text", "kind", "message"),
    [
        (
            400,
            '{"error": {"message": "too long"}}',
            PromptRefusedError,
            r"^engine answered 400: too long$",
        ),
        (
            500,
            '{"error": {"message": "out of memory"}}',
            EngineError,
            r"^engine answered 500: out of memory$",
        ),
        (502, "<html>", EngineError, r"^engine answered 502: <html>$"),
        (500, '{"error": "out"}', EngineError, r'^engine answered 500: {"error": "out"}$'),
    ],
)
def test_another_answer_is_an_error(
    status: int, text: str, kind: type[EngineError], message: str
) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        refusal(status, text)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), ("0", 0), ("default", UNKNOWN_VERSION), ("", -1), ("-1", -1)]
)
def test_weight_versions_of_ours_are_numbers(text: str, number: int) -> None:
    assert version_number(text) == number


def test_masking_leaves_only_tokens_of_the_newest_weights() -> None:
    sample = Sample(0)
    sample.append_prompt([1])
    sample.append([2, 3, 4], [-1.0] * 3, [WeightSpan(5, 0, 3)])
    sample.append([9], [], [WeightSpan(6, 0, 1)], trainable=False)
    sample.append([5, 6], [-1.0] * 2, [WeightSpan(6, 0, 2)])
    mask_off_policy(sample)
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_masking_looks_at_all_branches() -> None:
    sample = Sample(0, branches=[TokenSequence(), TokenSequence()])
    for sequence, version in zip(sample.sequences, (6, 5, 6), strict=True):
        sequence.append([2, 3], [-1.0] * 2, [WeightSpan(version, 0, 2)])
    mask_off_policy(sample)
    assert [one.loss_mask.tolist() for one in sample.sequences] == [[1, 1], [0, 0], [1, 1]]


def test_masking_leaves_a_sample_of_one_version_alone() -> None:
    sample = Sample(0)
    sample.append([2, 3], [-1.0] * 2, [WeightSpan(5, 0, 2)])
    mask_off_policy(sample)
    assert sample.loss_mask.tolist() == [1, 1]


@pytest.mark.parametrize(("body", "reason"), [
    ("True", None), ("False", "mine"), ("None", None), ("'too easy'", "too easy"), ("0 and 1", "0"),
])  # fmt: skip
async def test_what_a_filter_says(tmp_path: Path, body: str, reason: str | None) -> None:
    (tmp_path / "filter.py").write_text(f"def mine(group):\n    return {body}\n")
    user_code.load.cache_clear()
    assert await filters.load(f"{tmp_path}/filter.py:mine")(SampleGroup(Prompt(0, "x"))) == reason


async def test_filters_of_the_buffer_keep_everything_here() -> None:
    for name in (None, *filters.BUILT_IN):
        assert await filters.load(name)(SampleGroup(Prompt(0, "x"))) is None


def test_a_filter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"spec\.rollout\.dynamicFilter: .*there is no file"
    ):
        filters.load(f"{tmp_path}/none.py:mine")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/gsm8k.jsonl", "gsm8k"),
        ("/data/gsm8k.jsonl@[0:100]", "gsm8k"),
        ("math.v2.parquet", "math.v2"),
    ],
)
def test_a_source_is_called_as_its_file(path: str, name: str) -> None:
    assert PromptSource(path=path).source_name == name


def test_sampling_parameters_are_sglangs() -> None:
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
