"""Images in agents' conversations: each is read and stored once, and a turn has exactly its own."""

from __future__ import annotations

import base64
import contextlib
import copy
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sluice.images import reading
from sluice.images.image import Image, data_url, image_part
from sluice.images.processor import ImageProcessor
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import TURNS
from sluice.wire.rpc import RefusedError
from sluice_rollout.episode import Episode
from sluice_rollout.gateway import images as gateway_images
from sluice_rollout.gateway.registry import EpisodeRegistry
from sluice_rollout.generate import REQUESTS, GroupRequests
from sluice_rollout.group import GroupMaker
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.scoring.scorer import Scorer
from tests.unit.buffer.buffer_tools import make_job
from tests.unit.gateway.gateway_tools import episode_runner, open_registry, play_episode, post
from tests.unit.rollout.scripted_engine import PARAMS, Script, drain_after_the_last
from tests.vision_models import make_model, picture

CAT, DOG, WIDE = picture(64, 64, seed=1), picture(64, 64, seed=2), picture(384, 256, seed=3)
END = "<|im_end|>"
LEASE = "train.0.3.1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vision") / "model", "qwen3_vl")


@pytest.fixture
def group() -> Iterator[GroupRequests]:
    requests = GroupRequests(0)
    token = REQUESTS.set(requests)
    yield requests
    REQUESTS.reset(token)


class StoredImages:
    """Images that a buffer has, with a record of the calls that stored them."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.images: dict[str, Image] = {}
        self.puts: list[tuple[str, Image]] = []

    async def put(self, lease_id: str, images: Sequence[Image]) -> None:
        if self.refusal:
            raise RefusedError(self.refusal)
        self.puts += [(lease_id, image) for image in images]
        self.images |= {image.digest: image for image in images}

    async def get(self, digests: Sequence[str]) -> list[Image]:
        return [self.images[digest] for digest in digests]


@contextlib.asynccontextmanager
async def gateway(
    directory: Path, model: Path, stored: StoredImages | None = None, **changes: Any
) -> AsyncIterator[EpisodeRegistry]:
    """Open the registry of a job with images."""
    prompts = [{"path": str(directory / "prompts.jsonl")}]
    job = make_job(
        directory,
        model__path=str(model),
        rollout__function="play.py:play",
        data={"prompts": prompts, "images": changes.pop("limits", {})},
        **changes,
    )
    client: Any = stored or StoredImages()
    encoder = PromptEncoder(job.spec, model)
    async with EpisodeRegistry.for_job(job.spec, encoder, image_client=client) as registry:
        yield registry


def answers(registry: EpisodeRegistry, *texts: str) -> Script:
    encode = registry.encoder.tokenizer.encode
    return Script(*([int(i) for i in encode(t + END, add_special_tokens=False)] for t in texts))


def shown(image: Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image), "detail": "high"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def asked(episode: Episode, path: str = "chat/completions", **body: Any) -> dict[str, Any]:
    """Ask the model; return the answer, or the error, with its status."""
    gateway = episode.gateway
    headers = {"Authorization": f"Bearer {gateway.api_key}", "x-api-key": gateway.api_key}
    url = f"{gateway.base_url}/{path}"
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url, json={"model": "m", "max_tokens": 64, **body}) as answer,
    ):
        return {**await answer.json(), "status": answer.status}


async def converse(episode: Episode, *steps: list[dict[str, Any]]) -> list[int]:
    """Play a conversation: what comes before each turn. Returns the tokens of each context."""
    history: list[dict[str, Any]] = []
    lengths = []
    for step in steps:
        answer = await asked(episode, messages=[*history, *step])
        assert answer["status"] == 200, answer
        history += [*step, answer["choices"][0]["message"]]
        lengths.append(answer["usage"]["prompt_tokens"])
    return lengths


def check(sample: Sample, processor: ImageProcessor) -> None:
    """Check that each sequence has a placeholder for each image, and counts their tokens."""
    sample.check_tokens()
    images = {image.digest: image for image in (CAT, DOG, WIDE)}
    for sequence in sample.sequences:
        assert sequence.tokens.tolist().count(processor.placeholder) == len(sequence.images)
        sizes = [(images[d].width, images[d].height) for d in sequence.images]
        assert sequence.image_tokens == processor.added(sizes)


def processor_of(registry: EpisodeRegistry) -> ImageProcessor:
    assert registry.encoder.image_processor
    return registry.encoder.image_processor


async def test_images_of_users_and_of_tools_are_read_and_stored_once(
    tmp_path: Path, model: Path, group: GroupRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    reads: list[str] = []
    stored = StoredImages()

    async def play(episode: Episode) -> None:
        question = [user(said("Which animal? "), shown(CAT))]
        result = [{"role": "tool", "tool_call_id": "1", "content": [said("Look: "), shown(WIDE)]}]
        lengths.extend(await converse(episode, question, result, [user(shown(CAT), shown(DOG))]))

    def read(raw: reading.RawImage, *arguments: Any) -> Image:
        reads.append(raw.name)
        return reading.read_image(raw, *arguments)

    monkeypatch.setattr(gateway_images, "read_image", read)
    async with gateway(tmp_path, model, stored) as registry:
        engine = answers(registry, "a", "b", "c")
        runner = episode_runner(registry, play, engine)
        prompt = Prompt(3, "?", lease_id=LEASE)
        sample = await runner(prompt, [1], Sample(0), PARAMS | {"max_new_tokens": 400})
        processor = processor_of(registry)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    assert engine.images == [[CAT], [CAT, WIDE], [CAT, WIDE, CAT, DOG]]
    assert [ids.count(processor.placeholder) for ids in engine.prompt_ids] == [1, 2, 4]
    assert engine.prompt_ids[2][: len(engine.prompt_ids[1])] == engine.prompt_ids[1]
    assert stored.puts == [(LEASE, CAT), (LEASE, WIDE), (LEASE, DOG)]
    assert reads == [
        "messages[0].content[1].image_url",
        "messages[2].content[1].image_url",
        "messages[4].content[1].image_url",
    ]
    assert not sample.branches
    assert sample.images == [image.digest for image in (CAT, WIDE, CAT, DOG)]
    check(sample, processor)
    assert lengths == [
        len(ids) + processor.added([(image.width, image.height) for image in images])
        for ids, images in zip(engine.prompt_ids, engine.images, strict=True)
    ]
    assert group.images == {}, "files are kept only while requests need them"


async def test_another_image_at_the_same_place_begins_a_branch(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    async def play(episode: Episode) -> None:
        for image in (CAT, DOG):
            await converse(episode, [user(shown(image))], [user(said("Why?"))])

    async with gateway(tmp_path, model) as registry:
        engine = answers(registry, "a", "b", "a", "b")
        sample = await play_episode(registry, play, engine)
        check(sample, processor_of(registry))
    assert engine.prompt_ids[0] == engine.prompt_ids[2]
    assert engine.prompt_ids[1] == engine.prompt_ids[3]
    assert engine.images == [[CAT], [CAT], [DOG], [DOG]]
    assert [sequence.images for sequence in sample.sequences] == [[CAT.digest], [DOG.digest]]
    assert all(sequence.loss_mask.sum() == 4 for sequence in sample.sequences)


def anthropic_image(image: Image) -> dict[str, Any]:
    data = base64.b64encode(image.data).decode()
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": image.media_type, "data": data},
    }


async def test_all_interfaces_give_the_same_tokens(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    """A user's image, and the result of a tool with an image."""

    async def play(episode: Episode) -> None:
        result = {"role": "tool", "tool_call_id": "1", "content": [shown(DOG), said("a dog")]}
        chat = [user(said("See "), shown(CAT)), result]
        assert (await asked(episode, messages=chat))["status"] == 200
        blocks = [anthropic_image(DOG), said("a dog")]
        tool_result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
        messages = [user(said("See "), anthropic_image(CAT)), user(tool_result)]
        assert (await asked(episode, "messages", messages=messages))["status"] == 200
        text, picture = {"type": "input_text"}, {"type": "input_image"}
        items = [
            user(text | {"text": "See "}, picture | {"image_url": data_url(CAT)}),
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [picture | {"image_url": data_url(DOG)}, text | {"text": "a dog"}],
            },
        ]
        first = await asked(episode, "responses", input=items)
        assert first["status"] == 200
        more = user(picture | {"image_url": data_url(WIDE)})
        previous = {"previous_response_id": first["id"]}
        assert (await asked(episode, "responses", input=[more], **previous))["status"] == 200

    async with gateway(tmp_path, model) as registry:
        engine = answers(registry, "a", "a", "a", "b")
        sample = await play_episode(registry, play, engine)
        check(sample, processor_of(registry))
    assert engine.prompt_ids[0] == engine.prompt_ids[1] == engine.prompt_ids[2]
    assert engine.images == [[CAT, DOG], [CAT, DOG], [CAT, DOG], [CAT, DOG, WIDE]]


async def test_an_interrupted_sample_goes_on_with_its_images(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    stored = StoredImages()

    async def play(episode: Episode) -> None:
        await converse(episode, [user(shown(CAT))], [user(shown(WIDE))], [user(said("Why?"))])

    async with gateway(tmp_path, model, stored) as registry:
        engine = answers(registry, "a", "b")
        runner = episode_runner(registry, play, engine)
        drain_after_the_last(engine, runner)
        params = PARAMS | {"max_new_tokens": 400}
        sample = await runner(Prompt(3, "?"), [1], Sample(0), params)
        assert sample.status is SampleStatus.ABORTED
        check(sample, processor_of(registry))
        assert sample.images == [CAT.digest, WIDE.digest]
        before, group.stored = sample.tokens.tolist(), set()
        engine = answers(registry, "c")
        runner = episode_runner(registry, play, engine)
        sample = await runner(Prompt(3, "?"), [1], copy.deepcopy(sample), params)
        check(sample, processor_of(registry))
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    assert sample.tokens.tolist()[: len(before)] == before
    assert engine.images == [[CAT, WIDE]]
    assert not sample.branches
    models = [record for record in sample.metadata[TURNS] if record["by"] == "model"]
    assert [record.get("images", 0) for record in models] == [1, 1, 0]


def place(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "See."}, user(said("a"), part)]}


IN_CHAT = "messages[1].content[1].image_url: "


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        pytest.param(
            "chat/completions",
            place({"type": "image_url", "image_url": {"url": "https://a.org/cat.png"}}),
            IN_CHAT + "expected a data URL",
            id="an address",
        ),
        pytest.param(
            "chat/completions",
            place({"type": "image_url", "image_url": "/etc/hosts"}),
            IN_CHAT + "expected a data URL",
            id="a path",
        ),
        pytest.param(
            "chat/completions",
            place({"type": "image_url", "image_url": {"url": "data:text/plain,cat"}}),
            IN_CHAT + "expected a data URL",
            id="another data URL",
        ),
        pytest.param(
            "chat/completions",
            place({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}),
            IN_CHAT + "not valid base64",
            id="no base64",
        ),
        pytest.param(
            "chat/completions",
            place({"type": "image_url", "image_url": {"url": data_url(CAT)[:-400]}}),
            IN_CHAT + "the image is broken or cut off",
            id="cut off",
        ),
        pytest.param(
            "chat/completions",
            place(shown(picture(400, 300))),
            IN_CHAT + "a file of ",
            id="too many bytes",
        ),
        pytest.param(
            "chat/completions",
            {"messages": [{"role": "system", "content": [shown(CAT)]}]},
            "messages[0].content: images are read in messages of users",
            id="a system's image",
        ),
        pytest.param(
            "chat/completions",
            place(image_part(DOG.digest)),
            f"sha256:{DOG.digest} is not an image of the episode's prompt",
            id="an unknown reference",
        ),
        pytest.param(
            "chat/completions",
            {"messages": [user(said("<|image_pad|>"), shown(CAT))]},
            "2 placeholders <|image_pad|> for 1 new images",
            id="a placeholder in a text",
        ),
        pytest.param(
            "messages",
            {"messages": [user({"type": "tool_result", "content": [
                {"type": "image", "source": {"type": "url", "url": "https://a.org/cat.png"}}]})]},
            "messages[0].content[0].content[0].source: expected {type: base64",
            id="an address in a result",
        ),
        pytest.param(
            "responses",
            {"input": [user({"type": "input_image", "file_id": "file-1"})]},
            "input[0].content[0].image_url: expected a data URL",
            id="the id of a file",
        ),
        pytest.param(
            "completions",
            {"prompt": "<|image_pad|>What is it?"},
            "1 placeholders <|image_pad|> for 0 new images",
            id="a text with a placeholder",
        ),
        pytest.param(
            "completions", {"prompt": [shown(CAT)]}, "prompt: expected one text", id="a prompt"
        ),
        pytest.param(
            "../generate", {"text": "a", "image_data": data_url(CAT)}, "image_data: not supported",
            id="SGLang's API",
        ),
    ],
)  # fmt: skip
async def test_a_request_is_refused_with_the_place_of_its_image(
    path: str, body: dict[str, Any], message: str, tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    async def play(episode: Episode) -> None:
        answer = await asked(episode, path, **body)
        assert answer["status"] == 400
        assert message in answer["error"]["message"]
        await converse(episode, [user(shown(CAT))])

    async with gateway(tmp_path, model, limits={"maxBytes": "64Ki"}) as registry:
        engine = answers(registry, "a")
        sample = await play_episode(registry, play, engine)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    assert engine.images == [[CAT]], "the refused request has not reached the engine"


async def test_a_job_without_images_refuses_them_in_a_sentence(tmp_path: Path) -> None:
    async def play(episode: Episode) -> None:
        gateway = episode.gateway
        status, error = await post(
            f"{gateway.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {gateway.api_key}"},
            json={"messages": [user(shown(CAT))]},
        )
        assert status == 400
        assert error["param"] == "messages[0].content[0].image_url"
        assert "set data.images: {}" in error["message"]

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, Script())
    assert "before the model generated a token" in sample.error


async def test_the_limit_of_a_response_counts_the_tokens_of_images(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    async def play(episode: Episode) -> None:
        history = [user(said("a")), {"role": "assistant", "content": "a"}, user(shown(WIDE))]
        await converse(episode, history[:1])
        answer = await asked(episode, messages=history)
        assert answer["error"]["code"] == "context_length_exceeded"
        await converse(episode, history[:1], [user(shown(CAT))])

    async with gateway(tmp_path, model) as registry:
        processor = processor_of(registry)
        small, large = (processor.tokens_of(i.width, i.height) for i in (CAT, WIDE))
        assert small + 20 < large
        engine = answers(registry, "a", "a", "b")
        sample = await play_episode(registry, play, engine, tokens=large)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    assert engine.images[-1] == [CAT]


@pytest.mark.parametrize("overflow", ["drop_tool_results", "summarise"])
async def test_a_long_history_with_images_is_shortened(
    overflow: str, tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    async def play(episode: Episode) -> None:
        screens = [shown(WIDE), shown(WIDE)]
        results = [[{"role": "tool", "tool_call_id": str(i), "content": screens}] for i in range(3)]
        await converse(episode, [user(said("What? "), shown(CAT))], *results)

    limits = {"overflow": overflow, "turnTokens": 8}
    limits |= {"summary": {"tokens": 12}} if overflow == "summarise" else {}
    async with gateway(tmp_path, model, rollout__limits=limits) as registry:
        processor = processor_of(registry)
        assert processor.tokens_of(WIDE.width, WIDE.height) == 54
        engine = answers(registry, *"abcdefghi")
        tokens = 500 if overflow == "summarise" else 300
        sample = await play_episode(registry, play, engine, tokens=tokens)
        check(sample, processor)
        assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
        last = registry.encoder.tokenizer.decode(engine.prompt_ids[-1])
    assert sample.branches
    # The summary replaces the first result, and has room for two more; one result is not dropped.
    assert engine.images[-1] == [CAT, *[WIDE] * (4 if overflow == "summarise" else 2)]
    summary, dropped = "Summary of the conversation so far", "[dropped: the conversation was"
    assert (summary if overflow == "summarise" else dropped) in last


async def test_a_sample_fails_if_the_buffer_stores_no_image_of_it(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    async def play(episode: Episode) -> None:
        answer = await asked(episode, messages=[user(shown(CAT))])
        assert answer["status"] == 503

    async with gateway(tmp_path, model, StoredImages("the disk is full")) as registry:
        engine = Script()
        sample = await play_episode(registry, play, engine)
    assert sample.status is SampleStatus.FAILED
    assert sample.error == "mine.py:play cannot store an image of its agent: the disk is full"
    assert not engine.images


async def test_images_of_the_prompt_are_sent_as_references_or_as_data_urls(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    group.images = {CAT.digest: CAT}
    stored = StoredImages()

    async def play(episode: Episode) -> None:
        assert isinstance(episode.prompt.prompt, list)
        first = [*episode.prompt.prompt]
        await converse(episode, first, [user(shown(episode.images[0]), shown(DOG))])

    async with gateway(tmp_path, model, stored) as registry:
        engine = answers(registry, "a", "b")
        runner = episode_runner(registry, play, engine)
        messages = [user(said("See "), image_part(CAT.digest))]
        prompt = Prompt(3, messages, images=[CAT.digest], lease_id=LEASE)
        given = Sample(index=0, images=[CAT.digest], image_tokens=3)
        sample = await runner(prompt, [1], given, PARAMS | {"max_new_tokens": 400})
        check(sample, processor_of(registry))
    assert engine.images == [[CAT], [CAT, CAT, DOG]]
    assert stored.puts == [(LEASE, DOG)]
    assert group.images == {CAT.digest: CAT}


async def test_a_conversation_ends_if_the_model_generates_a_placeholder(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    """An engine would look for another image."""

    async def play(episode: Episode) -> None:
        await converse(episode, [user(shown(CAT))])
        answer = await asked(
            episode,
            messages=[user(shown(CAT)), {"role": "assistant", "content": "a"}, user(said("Why?"))],
        )
        assert answer["error"]["code"] == "context_length_exceeded"

    async with gateway(tmp_path, model) as registry:
        engine = answers(registry, "a<|image_pad|>")
        sample = await play_episode(registry, play, engine)
    assert len(engine.images) == 1
    assert sample.images == [CAT.digest]


async def test_a_broken_sample_with_images_goes_back_as_its_prompt(
    tmp_path: Path, model: Path, group: GroupRequests
) -> None:
    """The trainer sees the tokens of failed samples too."""
    group.images = {CAT.digest: CAT}

    async def play(episode: Episode) -> None:
        await converse(episode, [user(shown(CAT))], [user(shown(DOG))])
        registry.encoder.embedding = 1  # no id of the engine is below it

    async with gateway(tmp_path, model) as registry:
        runner = episode_runner(registry, play, answers(registry, *"aaaa"))
        runner.generator.placeholder = processor_of(registry).placeholder
        client: Any = StoredImages()
        client.images = {CAT.digest: CAT}
        judge: Any = None
        scorer = Scorer(registry.spec, runner.generator.text, judge)
        maker = GroupMaker(
            registry.spec, registry.encoder, runner.generator, scorer, judge, runner,
            image_client=client,
        )  # fmt: skip
        prompt = Prompt(3, [user(image_part(CAT.digest))], images=[CAT.digest])
        group_made = await maker.make(prompt, [])
    for sample in group_made.samples:
        check(sample, processor_of(registry))
        assert "a broken sample" in sample.error
        assert (sample.images, sample.response_length) == ([CAT.digest], 0)
