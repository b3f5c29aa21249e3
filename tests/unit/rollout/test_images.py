"""A sample keeps its prompt's images through turns, branches and partial responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sluice.images.image import Image
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.episode import Episode
from sluice_rollout.generate import REQUESTS, GroupRequests
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests.unit.rollout.scripted_engine import PARAMS, Script, scripted_runner

IMAGE, PLACEHOLDER, VIDEO = Image("image/png", 64, 32, b"png"), 99, 98
PROMPT = [1, PLACEHOLDER, 3]


@pytest.fixture(autouse=True)
def images_of_the_group() -> Iterator[None]:
    token = REQUESTS.set(GroupRequests(0, images={IMAGE.digest: IMAGE}))
    yield
    REQUESTS.reset(token)


def with_image() -> Sample:
    return Sample(index=0, images=[IMAGE.digest], image_tokens=7)


def runner(play: Any, engine: Script) -> EpisodeRunner:
    playing = scripted_runner(play, engine)
    playing.generator.placeholder = PLACEHOLDER
    playing.generator.media_tokens = frozenset({PLACEHOLDER, VIDEO})
    return playing


async def played(play: Any, engine: Script) -> Sample:
    row = Prompt(0, "?", images=[IMAGE.digest])
    return await runner(play, engine)(row, PROMPT, with_image(), PARAMS)


async def test_each_request_of_a_sample_has_its_images() -> None:
    engine = Script("4 5", [6])
    sample = await runner(None, engine).generator(PROMPT, with_image(), PARAMS)
    assert sample.tokens.tolist() == [*PROMPT, 4, 5, 6]
    assert (sample.images, sample.image_tokens, sample.length) == ([IMAGE.digest], 7, 13)
    assert engine.prompt_ids == [PROMPT, [*PROMPT, 4, 5]]
    assert engine.images == [[IMAGE], [IMAGE]]


async def test_a_function_sees_the_images_and_its_branches_keep_them() -> None:
    seen: list[Image] = []

    async def play(episode: Episode) -> None:
        seen.extend(episode.images)
        await episode.generate()
        branch = episode.branch()
        branch.observe("5")
        await branch.generate()
        episode.adopt(branch)

    engine = Script([4], [6])
    sample = await played(play, engine)
    assert seen == [IMAGE]
    assert (sample.status, sample.images, sample.image_tokens) == ("completed", [IMAGE.digest], 7)
    assert sample.tokens.tolist() == [*PROMPT, 4, 5, 6]
    assert engine.images == [[IMAGE], [IMAGE]]


async def test_a_question_aside_has_the_images_that_its_tokens_name() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        await episode.ask(PROMPT)
        await episode.ask("7 8")
        with pytest.raises(ValueError, match="2 placeholders of images, and the prompt has 1"):
            await episode.ask([*PROMPT, PLACEHOLDER])

    engine = Script([4], [5], [6])
    sample = await played(play, engine)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    assert engine.images == [[IMAGE], [IMAGE], []]


def test_files_of_running_requests_are_held_until_the_last_of_them_ends() -> None:
    other = Image("image/png", 64, 32, b"other")
    group = GroupRequests(0, images={IMAGE.digest: IMAGE})
    files = {image.digest: image for image in (IMAGE, other)}
    with group.holding(files):
        with group.holding(files):
            assert group.images == files
        assert group.images == files
    assert group.images == {IMAGE.digest: IMAGE}


@pytest.mark.parametrize("token", [PLACEHOLDER, VIDEO], ids=["image", "video"])
@pytest.mark.parametrize("cut_off", [True, False], ids=["resumed", "next turn"])
async def test_a_response_ends_if_the_model_generates_a_placeholder(
    cut_off: bool, token: int
) -> None:
    """An engine would look for another image."""
    if cut_off:
        engine = Script(f"4 {token}")
        sample = await runner(None, engine).generator(PROMPT, with_image(), PARAMS)
    else:

        async def play(episode: Episode) -> None:
            while True:
                await episode.generate()

        engine = Script([4, token])
        sample = await played(play, engine)
    assert sample.tokens.tolist() == [*PROMPT, 4, token]
    assert sample.status is SampleStatus.TRUNCATED
    assert len(engine.images) == 1
