"""The worker's pure parts: events of a stream, weight spans, masks, filters, prompts, sampling parameters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.api import EvaluationSampling, PromptSource, Sampling
from sluice.environment import ConfigurationError
from sluice.sample import Prompt, Sample, SampleGroup, WeightSpan
from sluice_rollout import filters
from sluice_rollout.engine import (
    UNKNOWN_VERSION,
    EngineError,
    Generation,
    PromptRefusedError,
    events,
    streamed,
    version_number,
)
from sluice_rollout.generate import sampling_params
from sluice_rollout.group import mask_off_policy


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def read(data: bytes, size: int = 1 << 20) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return [event async for event in events(pieces(data, size))]

    return asyncio.run(all_of_them())


def put_together(*arriving: dict[str, Any]) -> Generation:
    async def some() -> AsyncIterator[dict[str, Any]]:
        for event in arriving:
            yield event

    return asyncio.run(streamed(some()))


def event(version: str, new: int, so_far: int, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """The last `new` of so many tokens, as SGLang sends them with --incremental-streaming-output."""
    entries = [[-1.0, i, None] for i in range(so_far - new, so_far)]
    meta = {"weight_version": version, "output_token_logprobs": entries, "completion_tokens": so_far}
    return {"meta_info": meta | more | {"finish_reason": {"type": finish} if finish else None}}


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.text(max_size=5)), max_size=5), st.integers(1, 40))
def test_events_come_whole_however_they_are_cut(sent: list[dict[str, str]], size: int) -> None:
    data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in sent) + b"data: [DONE]\n\n"
    assert read(data, size) == sent


def test_an_event_may_be_larger_than_a_line_of_aiohttp() -> None:
    large = {"tokens": list(range(200_000))}
    assert read(b"data: " + json.dumps(large).encode() + b"\n\n", 65536) == [large]


def test_a_prompt_may_be_refused_in_the_stream() -> None:
    with pytest.raises(PromptRefusedError, match=r"^engine: too long$"):
        read(b'data: {"error": {"message": "too long", "code": 400}}\n\n')


def test_a_request_that_is_aborted_before_it_begins_is_no_error() -> None:
    assert read(b'data: {"error": {"message": "Request 1-0 was aborted"}}\n\ndata: [DONE]\n\n') == []


def test_an_error_in_the_stream_is_the_engines() -> None:
    with pytest.raises(EngineError, match="out of memory"):
        read(b'data: {"error": "out of memory"}\n\n')


def test_a_token_of_a_stream_belongs_to_the_version_of_the_event_that_brought_it() -> None:
    made = put_together(event("3", 2, 2), event("3", 0, 2), event("4", 1, 3), event("4", 3, 6, "stop"))
    assert made.spans == [WeightSpan(3, 0, 2), WeightSpan(4, 2, 6)]
    assert (made.tokens, made.finish) == ([0, 1, 2, 3, 4, 5], "stop")


def test_tokens_that_come_together_under_a_new_version_count_as_begun_under_the_old_one() -> None:
    made = put_together(event("3", 1, 1), event("4", 4, 5), event("4", 4, 9), event("5", 2, 11, "length"))
    assert made.spans == [WeightSpan(3, 0, 5), WeightSpan(4, 5, 11)]


def test_where_each_token_has_a_version_that_counts() -> None:
    known = event("4", 4, 5, sluice_versions=["3", "3", "4", "4"])
    unknown = event("5", 2, 7, sluice_versions=[None, None])
    made = put_together(event("3", 1, 1, sluice_versions=["3"]), known, unknown, event("5", 2, 9, "stop"))
    assert made.spans == [WeightSpan(3, 0, 3), WeightSpan(4, 3, 7), WeightSpan(5, 7, 9)]


def test_a_stream_that_ends_without_a_word_is_an_abort() -> None:
    assert put_together(event("3", 2, 2)).finish == "abort"
    assert put_together().tokens == []


def test_a_stream_of_another_kind_is_told_by_its_counts() -> None:
    with pytest.raises(EngineError, match=r"5 tokens came for 3; it needs --incremental-streaming-output"):
        put_together(event("3", 2, 2), event("3", 3, 3, "stop"))


@pytest.mark.parametrize(("text", "number"), [("12", 12), ("0", 0), ("default", UNKNOWN_VERSION), ("", -1), ("-1", -1)])
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


def test_masking_leaves_a_sample_of_one_version_alone() -> None:
    sample = Sample(0)
    sample.append([2, 3], [-1.0] * 2, [WeightSpan(5, 0, 2)])
    mask_off_policy(sample)
    assert sample.loss_mask.tolist() == [1, 1]


@pytest.mark.parametrize(("body", "reason"), [
    ("True", None), ("False", "mine"), ("None", None), ("'too easy'", "too easy"), ("0 and 1", "0"),
])  # fmt: skip
def test_what_a_filter_says(tmp_path: Path, body: str, reason: str | None) -> None:
    (tmp_path / "filter.py").write_text(f"def mine(group):\n    return {body}\n")
    filters.custom.load.cache_clear()
    assert filters.load(f"{tmp_path}/filter.py:mine")(SampleGroup(Prompt(0, "x"))) == reason


def test_filters_of_the_buffer_keep_everything_here() -> None:
    for name in (None, *filters.BUILT_IN):
        assert filters.load(name)(SampleGroup(Prompt(0, "x"))) is None


def test_a_filter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.rollout\.dynamicFilter: .*there is no file"):
        filters.load(f"{tmp_path}/none.py:mine")


@pytest.mark.parametrize(("path", "name"), [
    ("/data/gsm8k.jsonl", "gsm8k"), ("/data/gsm8k.jsonl@[0:100]", "gsm8k"), ("math.v2.parquet", "math.v2"),
])  # fmt: skip
def test_a_source_is_called_as_its_file(path: str, name: str) -> None:
    assert PromptSource(path=path).source_name == name


def test_sampling_parameters_are_sglangs() -> None:
    params = sampling_params(Sampling(temperature=0.7, top_p=0.9, max_response_tokens=5, stop=["\n"]))
    assert params == {
        "temperature": 0.7, "top_p": 0.9, "top_k": -1, "max_new_tokens": 5, "stop": ["\n"], "skip_special_tokens": True,
    }  # fmt: skip


def test_evaluation_overrides_what_it_sets_and_nothing_else() -> None:
    params = sampling_params(
        Sampling(temperature=0.7, top_k=9), EvaluationSampling(temperature=0, max_response_tokens=3)
    )
    assert (params["temperature"], params["top_k"], params["max_new_tokens"]) == (0, 9, 3)
