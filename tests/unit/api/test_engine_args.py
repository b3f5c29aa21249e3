"""Arguments of an engine with which the weights of an update would not arrive."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sluice.api import RLJobSpec
from sluice.api.groups.engine_args import REFUSED, RefusedArgument, kebab
from sluice.api.schema.crd import schema_of
from sluice.api.schema.explain import explained
from tests.algorithm_cases import manifest


def problems(arguments: dict[str, Any], *, rollout_only: bool = False) -> list[str]:
    groups: dict[str, Any] = {"rollout": {"engineArgs": arguments}}
    groups |= {"debug": {"rolloutOnly": True}} if rollout_only else {}
    try:
        RLJobSpec.model_validate(manifest({}, groups))
    except ValidationError as error:
        return [problem["msg"] for problem in error.errors()]
    return []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"speculativeAlgorithm": "EAGLE"},
            "speculative decoding (speculativeAlgorithm) also concerns updates, which must not "
            "change a draft model: set rollout.speculative",
        ),
        (
            {"speculativeAcceptThresholdAcc": 0.9},
            "proposed tokens that are accepted by a threshold (speculativeAcceptThresholdAcc) are "
            "no samples of the policy: leave it out",
        ),
        (
            {"enable-lora": True},
            "LoRA adapters (enable-lora) are not supported, because an engine serves the model "
            "that is trained: leave them out",
        ),
        (
            {"quantization": "fp8"},
            "quantized weights (quantization) also concern updates and the loss: set "
            "rollout.precision",
        ),
        (
            {"kvCacheDtype": "fp8_e4m3"},
            "a KV cache in few bits (kvCacheDtype) also concerns the loss: set "
            "rollout.kvCacheDtype",
        ),
        (
            {"disaggregationMode": "prefill"},
            "an engine that is only a part of one (disaggregationMode) is not supported, because "
            "each engine of a job prefills and decodes by itself: leave it out",
        ),
        (
            {"enableLmcache": True},
            "a cache outside of the engine (enableLmcache) is not supported, because it would "
            "outlive the weights that it was computed with: leave it out",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_an_argument_that_an_update_does_not_reach_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    assert problems(arguments) == [message]


@pytest.mark.parametrize("argument", REFUSED, ids=lambda argument: argument.name)
def test_every_spelling_is_refused_in_both_languages(argument: RefusedArgument) -> None:
    value: Any = {"boolean": True, "array": ["a"], "string": "x"}[argument.kind]
    value = argument.only[0] if argument.only else value
    fields = schema_of(RLJobSpec)["properties"]["rollout"]["properties"]["engineArgs"]["properties"]
    for spelling in argument.spellings():
        assert kebab(spelling) == argument.name
        assert len(problems({spelling: value})) == 1
        assert fields[spelling]["type"] == argument.kind, "an API server shows it to CEL"


@pytest.mark.parametrize(
    "arguments",
    [
        {"enableLora": False},
        {"disaggregation-mode": "null"},
        {"quantization": "unquant"},
        {"loadFormat": "auto"},
        {"memFractionStatic": 0.7, "cudaGraphBs": [1, 2]},
    ],
    ids=str,
)
def test_a_harmless_argument_is_accepted(arguments: dict[str, Any]) -> None:
    assert problems(arguments) == []


def test_a_job_that_trains_nothing_may_have_other_weights() -> None:
    assert problems({"quantization": "fp8"}, rollout_only=True) == []
    assert len(problems({"disaggregationMode": "decode"}, rollout_only=True)) == 1


def test_refused_arguments_are_not_explained_as_fields() -> None:
    assert explained("rollout.engineArgs").children == ()
