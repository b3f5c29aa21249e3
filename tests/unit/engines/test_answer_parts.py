"""The parts of a streamed answer, as the plugin makes them of SGLang's outputs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from sluice.engines.protocol import Generation
from sluice.engines.sglang.client import generation
from sluice.samples.sample import WeightSpan
from tests.unit.engines.conftest import Plugin

# SGLang passes the same list in each output, and goes on filling it.
ENTRIES = [(-0.1 * (i + 1), 10 + i, None) for i in range(6)]


def output(tokens: int, spans: list[tuple[str, int, int]], finish: Any = None) -> dict[str, Any]:
    versions = [{"version": v, "start": start, "end": end} for v, start, end in spans]
    meta = {
        "finish_reason": finish,
        "completion_tokens": tokens,
        "output_token_logprobs": ENTRIES,
        "weight_version": "2",
        "weight_versions": versions,
    }
    return {"meta_info": meta}


async def outputs(*some: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    for one in some:
        yield one


async def never() -> bool:
    return False


async def test_the_parts_are_the_whole_answer_with_its_versions(plugin: Plugin) -> None:
    sent: list[Generation] = []
    end = output(6, [("1", 0, 3), ("2", 3, 6)], {"type": "stop"})
    last = await plugin("http.answer_parts").last_output(
        outputs(output(2, [("1", 0, 2)]), output(5, [("1", 0, 3), ("2", 3, 5)]), end),
        lambda part: sent.append(generation(json.loads(part))),
        never,
    )
    assert last is end
    assert [part.tokens for part in sent] == [[10, 11], [12, 13, 14]]
    assert [part.log_probs for part in sent] == [[-0.1, -0.2], pytest.approx([-0.3, -0.4, -0.5])]
    assert [part.spans for part in sent] == [
        [WeightSpan(1, 0, 2)],
        [WeightSpan(1, 0, 1), WeightSpan(2, 1, 3)],
    ]
    assert [part.finish for part in sent] == ["", ""]


async def test_versions_of_each_token_are_cut_likewise(plugin: Plugin) -> None:
    """SGLang before 0.5.21 has them from the plugin."""
    meta = output(5, [])["meta_info"] | {"sluice_versions": [None, "1", "1", "2", "2", "2"]}
    del meta["weight_versions"]
    part = generation(plugin("http.answer_parts").part(meta, 2))
    assert (part.tokens, part.spans) == (
        [12, 13, 14],
        [WeightSpan(1, 0, 1), WeightSpan(2, 1, 3)],
    )


async def test_no_part_is_sent_to_a_client_that_has_left(plugin: Plugin) -> None:
    sent: list[bytes] = []

    async def left() -> bool:
        return True

    with pytest.raises(ConnectionError):
        await plugin("http.answer_parts").last_output(
            outputs(output(2, [("1", 0, 2)])), sent.append, left
        )
    assert not sent


async def test_an_output_without_versions_makes_no_part(plugin: Plugin) -> None:
    sent: list[bytes] = []
    unknown = output(2, [])
    del unknown["meta_info"]["weight_versions"]
    end = output(6, [("1", 0, 6)], {"type": "stop"})
    last = await plugin("http.answer_parts").last_output(outputs(unknown, end), sent.append, never)
    assert (last, sent) == (end, [])


@pytest.mark.parametrize(
    ("reason", "refused"),
    [
        pytest.param({"type": "stop"}, None, id="an answer"),
        pytest.param({"type": "abort", "message": "x"}, None, id="aborted with its tokens"),
        pytest.param(
            {"type": "abort", "message": "too long", "status_code": 400}, (400, "too long"),
            id="refused",
        ),
        pytest.param(
            {"type": "abort", "message": "full", "status_code": 503}, (503, "full"), id="full"
        ),
    ],
)  # fmt: skip
def test_what_sglang_raises_of_a_whole_answer_is_a_refusal(
    reason: dict[str, Any], refused: tuple[int, str] | None, plugin: Plugin
) -> None:
    assert plugin("http.answer_parts").refusal(output(0, [], reason)) == refused
