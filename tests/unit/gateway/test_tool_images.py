"""Images in results of a ToolLoop's tools: read, stored and counted like those of agents."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from sluice.images.image import data_url
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.gateway.registry import EpisodeRegistry
from sluice_rollout.generate import GroupRequests
from sluice_rollout.tools import ToolCall, ToolLoop
from tests.unit.gateway.gateway_tools import episode_runner, open_registry, play_episode
from tests.unit.gateway.test_images import (
    CAT,
    DOG,
    LEASE,
    WIDE,
    StoredImages,
    answers,
    check,
    gateway,
    processor_of,
    shown,
)
from tests.unit.gateway.test_images import group as group
from tests.unit.gateway.test_images import model as model
from tests.unit.rollout.scripted_engine import PARAMS, Script, drain_after_the_last


def looking(*results: Any, turns: int = 2) -> ToolLoop:
    """A loop whose turns call the tool `look` until it has given these results."""
    left = list(results)

    def look() -> Any:
        return left.pop(0)

    return ToolLoop([look], parse=lambda _: [ToolCall("look", {})], max_turns=turns)


def text(registry: EpisodeRegistry, sample: Sample) -> str:
    return str(registry.encoder.tokenizer.decode(sample.tokens.tolist()))


ENCODED = base64.b64encode(CAT.data).decode()
FORMS = [
    pytest.param(CAT.data, id="bytes"),
    pytest.param(data_url(CAT), id="a data URL"),
    pytest.param(["", CAT.data], id="a list"),
    pytest.param(shown(CAT), id="OpenAI"),
    pytest.param({"type": "image", "data": ENCODED, "mimeType": "image/png"}, id="MCP"),
    pytest.param(
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}},
        id="Anthropic",
    ),
]


@pytest.mark.parametrize("result", FORMS)
async def test_the_model_sees_the_image_of_a_tool(
    result: Any, tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    async with gateway(tmp_path, model) as registry:
        engine = answers(registry, "a", "b")
        sample = await play_episode(registry, looking(result), engine)
        check(sample, processor_of(registry))
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    assert engine.images == [[], [CAT]]
    assert sample.images == [CAT.digest]


async def test_images_of_several_turns_are_stored_once_and_keep_their_order(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    stored = StoredImages()
    async with gateway(tmp_path, model, stored) as registry:
        engine = answers(registry, "a", "b", "c")
        loop = looking(["see", CAT.data, "and", DOG.data], CAT.data, turns=3)
        runner = episode_runner(registry, loop, engine)
        prompt = Prompt(3, "?", lease_id=LEASE)
        sample = await runner(prompt, [1], Sample(0), PARAMS | {"max_new_tokens": 300})
        check(sample, processor_of(registry))
        assert "see<|vision_start|><|image_pad|><|vision_end|>and<|vision" in text(registry, sample)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    assert engine.images == [[], [CAT, DOG], [CAT, DOG, CAT]]
    assert stored.puts == [(LEASE, CAT), (LEASE, DOG)]
    assert group.images == {}, "the files are kept for running requests only"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        pytest.param(
            {"type": "image_url", "image_url": {"url": "https://a.org/cat.png"}},
            "error: the tool's image cannot be shown: ",
            id="an address",
        ),
        pytest.param({"type": "image", "image": "/etc/hosts"}, "no path is read", id="a path"),
        pytest.param(CAT.data[:-400], "the image is broken or cut off", id="cut off"),
    ],
)
async def test_the_model_reads_why_it_does_not_see_an_image(
    result: Any, words: str, tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    async with gateway(tmp_path, model) as registry:
        engine = answers(registry, "a", "b")
        sample = await play_episode(registry, looking(result), engine, tokens=400)
        assert words in text(registry, sample)
    assert (sample.status, sample.images) == (SampleStatus.COMPLETED, [])


async def test_a_model_without_images_reads_a_word_for_one(tmp_path: Path) -> None:
    async with open_registry(tmp_path) as registry:
        shown_parts = []
        loop = looking()

        async def play(episode: Any) -> None:
            shown_parts.append(await loop._shown(["see", CAT.data], episode))
            await episode.generate()

        await play_episode(registry, play, Script([5]))
    assert shown_parts == [["see", "(image)"]]


async def test_an_image_without_room_ends_the_episode(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    async with gateway(tmp_path, model) as registry:
        processor = processor_of(registry)
        room = processor.tokens_of(WIDE.width, WIDE.height)
        assert processor.tokens_of(CAT.width, CAT.height) + 40 < room
        engine = answers(registry, "a", "b")
        loop = looking(CAT.data, WIDE.data, turns=3)
        sample = await play_episode(registry, loop, engine, tokens=room + 20)
        check(sample, processor)
    assert (sample.status, sample.images) == (SampleStatus.TRUNCATED, [CAT.digest])


@pytest.mark.parametrize("again", [CAT, DOG], ids=["the same", "another"])
async def test_an_interrupted_loop_goes_on_from_its_images(
    again: Any, tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    stored = StoredImages()
    async with gateway(tmp_path, model, stored) as registry:
        engine = answers(registry, "a", "b")
        params = PARAMS | {"max_new_tokens": 300}
        prompt = Prompt(3, "?", lease_id=LEASE)
        runner = episode_runner(registry, looking(CAT.data, DOG.data, turns=3), engine)
        drain_after_the_last(engine, runner)
        sample = await runner(prompt, [1], Sample(0), params)
        assert (sample.status, sample.images[:1]) == (SampleStatus.ABORTED, [CAT.digest])

        same = again is CAT
        engine = answers(registry, *("c" if same else "bc"))
        loop = looking(again.data, DOG.data, turns=3)
        whole = await episode_runner(registry, loop, engine)(prompt, [1], sample, params)
        check(whole, processor_of(registry))
    assert (whole.status, whole.error) == (SampleStatus.COMPLETED, "")
    assert whole.images == [again.digest, DOG.digest]
    assert engine.images == [[again], [again, DOG]][same:]


async def test_a_sample_fails_if_the_buffer_does_not_store_its_image(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    async with gateway(tmp_path, model, StoredImages("the disk is full")) as registry:
        sample = await play_episode(registry, looking(CAT.data), answers(registry, "a"))
    assert sample.status is SampleStatus.FAILED
    assert "cannot store an image that it shows: the disk is full" in sample.error
