"""An engine answers to images as transformers does, before and after updates of its weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch
import transformers
from safetensors.torch import save_file

from sluice.engines.protocol import Client, Generation, PromptRefusedError
from sluice.engines.sglang import launch
from sluice.images.image import Image
from sluice.model_parts import kept_parts_of, trained_names
from tests.cases import quick
from tests.integration.engines import Sglang, distance, tensors
from tests.integration.vision_judge import Judge
from tests.integration.weights.test_sender import JoinEngine, MakeSender
from tests.integration.weights.tools import Tensors, publish
from tests.vision_models import TRAINED_FAMILIES, make_model, picture

TOLERANCE = 1e-4
SMALL, WIDE, LARGE = picture(64, 64, seed=1), picture(96, 40, seed=2), picture(300, 200, seed=3)
SAMPLING = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}


# An engine each. SGLang serves qwen3_vl in another way: test_adapter_images.py has that one.
@pytest.fixture(scope="module", params=quick(TRAINED_FAMILIES, "qwen3_5"))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vision") / "model", request.param)


@pytest.fixture(scope="module")
def judge(source: Path) -> Judge:
    return Judge(source)


@pytest.fixture(scope="module")
def seeing(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """An engine as a job with images starts it, told that the trainer brings the weights."""
    arguments = launch.render_args(launch.image_args(on_cpu=True))
    log = tmp_path_factory.mktemp("engine") / "log"
    server = Sglang(source, log, "--load-format", "dummy", *arguments, **launch.IMAGE_ENV)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()
        print(log.read_text()[-3000:])


@pytest.fixture
async def client(seeing: Sglang) -> AsyncIterator[Client]:
    async with seeing.engine.client(seeing.url) as client:
        await client.wait_ready(30.0)
        yield client


async def answer(client: Client, judge: Judge, *images: Image, after: list[int]) -> Generation:
    ids = [*judge.ids(len(images)), *after]
    sampling = SAMPLING | {"max_new_tokens": 8 - len(after)}
    return await client.generate("x", ids, sampling, cache="0", images=images)


@pytest.mark.support("sglang", "serves")
@pytest.mark.support("sglang", "images")
@pytest.mark.parametrize(
    "images", [[SMALL], [WIDE], [LARGE], [SMALL, WIDE], [LARGE, SMALL, WIDE]], ids=len
)
async def test_its_log_probs_are_those_of_transformers(
    client: Client, judge: Judge, images: list[Image]
) -> None:
    whole = await answer(client, judge, *images, after=[])
    expected = judge.log_probs(judge.ids(len(images)), images, whole.tokens)
    assert distance(whole.log_probs, expected) < TOLERANCE

    resumed = await answer(client, judge, *images, after=whole.tokens[:3])
    assert resumed.tokens == whole.tokens[3:]
    assert distance(resumed.log_probs, expected[3:]) < TOLERANCE


@pytest.mark.parametrize(
    "text",
    ["caf\u00e9", "<image>", "<|vision_start|>a<|vision_end|>"],
    ids=repr,
)
async def test_a_response_is_continued_token_by_token(
    client: Client, judge: Judge, text: str
) -> None:
    """SGLang decodes a prompt with images, and must not take its tokens from that text."""
    tokens = judge.tokenizer.encode(text, add_special_tokens=False)
    begun = [*tokens, tokens[0], 200, 150, tokens[-1]]  # no text has these tokens
    ids, images = judge.ids(2), [SMALL, WIDE]
    sampling = SAMPLING | {"max_new_tokens": 4}
    answer = await client.generate("x", [*ids, *begun], sampling, cache="0", images=images)
    expected = judge.log_probs(ids, images, [*begun, *answer.tokens])[len(begun) :]
    assert distance(answer.log_probs, expected) < TOLERANCE


async def test_another_image_gives_other_numbers(client: Client, judge: Judge) -> None:
    other = picture(64, 64, seed=9)
    one, two = [await answer(client, judge, image, after=[]) for image in (SMALL, other)]
    expected = judge.log_probs(judge.ids(1), [other], one.tokens)
    assert distance(one.log_probs, expected) > 10 * TOLERANCE
    assert one.log_probs != two.log_probs


async def test_given_tokens_are_scored_with_their_images(seeing: Sglang, judge: Judge) -> None:
    scorer, response = seeing.engine.scorer(seeing.url, 30.0), [70, 71, 72]
    try:
        tokens = [*judge.ids(2), *response]
        values = await scorer.log_probs(tokens, len(response), [LARGE, SMALL])
    finally:
        await scorer.close()
    assert distance(values, judge.log_probs(judge.ids(2), [LARGE, SMALL], response)) < TOLERANCE


async def test_a_broken_image_costs_its_own_request(client: Client, judge: Judge) -> None:
    broken = Image(SMALL.media_type, SMALL.width, SMALL.height, SMALL.data[:200])
    with pytest.raises(PromptRefusedError, match=r"engine answered 400.*truncated"):
        await answer(client, judge, broken, after=[])
    assert len((await answer(client, judge, SMALL, after=[])).tokens) == 8


def changed(source: Path, directory: Path, names: set[str], seed: int) -> Tensors:
    """Save a checkpoint whose tensors of these names differ; return all its tensors."""
    copytree(source, directory)
    torch.manual_seed(seed)
    weights = {
        name: tensor + 0.05 * torch.randn_like(tensor) if name in names else tensor
        for name, tensor in tensors(source)
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return sorted(weights.items())


@pytest.mark.support("sglang", "updates")
async def test_updates_bring_the_language_model_alone_or_with_the_tower(
    source: Path,
    seeing: Sglang,
    judge: Judge,
    client: Client,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    tmp_path: Path,
) -> None:
    assert kept_parts_of(source), "the tower is a separate part"
    names = [name for name, _ in tensors(source)]
    language = set(trained_names(transformers.AutoConfig.from_pretrained(source).to_dict(), names))
    await join_engine("rollout-0", seeing.address)
    sender = make_sender()
    before = await answer(client, judge, LARGE, after=[])
    for version, sent in enumerate((language, set(names)), 1):
        directory = tmp_path / str(version)
        weights = changed(source, directory, sent, version)
        update = await publish(sender, version, [(n, t) for n, t in weights if n in sent])
        assert (list(update.engines), update.failed) == (["rollout-0"], {})

        after = await answer(client, judge, LARGE, after=[])
        assert [span.version for span in after.spans] == [version]
        trained, ids = Judge(directory), judge.ids(1)
        assert distance(after.log_probs, trained.log_probs(ids, [LARGE], after.tokens)) < TOLERANCE
        assert distance(before.log_probs, trained.log_probs(ids, [LARGE], before.tokens)) > 0.01
