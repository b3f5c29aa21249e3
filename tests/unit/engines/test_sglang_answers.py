"""Answers of SGLang's /generate: tokens, weight versions, experts and errors."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from sluice.engines.http.client import version_number
from sluice.engines.protocol import UNKNOWN_VERSION, EngineError, Generation, PromptRefusedError
from sluice.engines.sglang.client import Client, generation, refusal
from sluice.samples.sample import WeightSpan


def answer(tokens: int, finish: str = "stop", **more: Any) -> dict[str, Any]:
    entries = [[-float(i), i, None] for i in range(tokens)]
    meta = {
        "weight_version": "5",
        "output_token_logprobs": entries,
        "finish_reason": {"type": finish},
    }
    return {"meta_info": meta | more}


def test_spans_of_an_answer_are_weight_versions() -> None:
    meta = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 2}]
    parsed = generation(answer(3, weight_versions=[*meta, {"version": "5", "start": 2, "end": 3}]))
    assert parsed == Generation(
        [0, 1, 2], [0.0, -1.0, -2.0], [WeightSpan(3, 0, 2), WeightSpan(5, 2, 3)], "stop", None
    )


def test_passes_that_verify_tokens_are_counted() -> None:
    spans = [{"version": "3", "start": 0, "end": 3}]
    parsed = generation(answer(3, weight_versions=spans, spec_verify_ct=2))
    assert parsed.speculative_passes == 2
    assert generation(answer(3, weight_versions=spans)).speculative_passes == 0


def test_an_engine_that_speculates_refuses_min_p() -> None:
    client = Client("http://e")
    client.body("r", [1], {"min_p": 0.1}, "")
    client._speculates = True
    client.body("r", [1], {"min_p": 0.0}, "")
    with pytest.raises(PromptRefusedError, match="ignores min_p under speculative decoding"):
        client.body("r", [1], {"min_p": 0.1}, "")


@pytest.mark.parametrize(
    ("highest", "dtype"), [(127, np.uint8), (300, np.uint16)], ids=["in a byte", "in two"]
)
def test_experts_of_an_answer_are_a_row_a_token(highest: int, dtype: type) -> None:
    """Routes of two tokens of a prompt and three of the answer, without the last one."""
    ids = np.full((4, 6), 2, np.int32)
    ids[3, 5] = highest
    meta: dict[str, Any] = {"routed_experts": base64.b64encode(ids.tobytes()).decode()}
    meta |= {"sluice_versions": ["3"] * 3, "prompt_tokens": 2, "completion_tokens": 3}
    parsed = generation(answer(3, **meta))
    assert parsed.experts is not None
    assert parsed.experts.dtype == dtype
    np.testing.assert_array_equal(parsed.experts, ids)
    with pytest.raises(EngineError, match="not an answer of SGLang's /generate"):
        generation(answer(3, **meta | {"prompt_tokens": 5}))


def test_versions_of_tokens_are_put_together_to_spans() -> None:
    parsed = generation(answer(5, "length", sluice_versions=[None, "3", "3", "4", "4"]))
    assert parsed.spans == [
        WeightSpan(UNKNOWN_VERSION, 0, 1),
        WeightSpan(3, 1, 3),
        WeightSpan(4, 3, 5),
    ]


def test_before_the_first_update_the_version_is_the_name_of_the_weights() -> None:
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


def test_tokens_of_a_request_that_was_aborted_in_the_queue_are_dropped() -> None:
    assert generation(answer(3, "abort")) == Generation([], [], [], "abort", None)


def test_a_request_that_is_aborted_before_it_begins_is_not_an_error() -> None:
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
def test_weight_versions_of_a_trainer_are_numbers(text: str, number: int) -> None:
    assert version_number(text) == number
