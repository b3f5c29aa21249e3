"""A worker between a buffer with images in its rows and an engine that sees them."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sluice.engines.protocol import Client
from sluice.engines.sglang import launch
from sluice.images.image import Image
from sluice.samples.sample import Purpose, Sample, SampleGroup, SampleStatus
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from tests.integration.engines import Sglang, distance
from tests.integration.rendezvous_server import DEADLINE, Rendezvous
from tests.integration.rollout.pods import Services, job, submitted
from tests.integration.vision_judge import Judge
from tests.vision_models import make_model, picture

TOLERANCE = 1e-4
READY = pb.TakeBatchResponse.STATE_READY
IMAGES = [picture(64, 64, seed=1), picture(120, 60, seed=2)]
# Images of the rows that can be generated from.
OF_ROWS = [IMAGES[:1], IMAGES, list[Image]()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vision") / "model", "qwen3_vl")


@pytest.fixture(scope="module")
def judge(model: Path) -> Judge:
    return Judge(model)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    arguments = launch.render_args(launch.image_args(on_cpu=True))
    log = tmp_path_factory.mktemp("engine") / "log"
    server = Sglang(model, log, *arguments, **launch.IMAGE_ENV)
    try:
        server.wait_ready()
        server.load_weights(model, "0")
        yield server
    finally:
        server.kill()


@pytest.fixture
async def engine(server: Sglang) -> AsyncIterator[Client]:
    async with server.engine.client(server.url) as engine:
        await engine.wait_ready(30.0)
        yield engine


def rows(directory: Path) -> Path:
    """Rows with one image, two, none, and one whose text has a placeholder too many."""
    urls = [f"data:image/png;base64,{base64.b64encode(image.data).decode()}" for image in IMAGES]
    texts = [
        ("<image>What is it?", urls[:1]),
        ("<image> and <image>: which is larger?", urls),
        ("How many legs has a horse?", []),
        ("<image>What does <|image_pad|> mean?", urls[1:]),
    ]
    path = directory / "images.jsonl"
    with path.open("w") as file:
        for text, images in texts:
            messages = [{"role": "user", "content": text}]
            file.write(json.dumps({"prompt": messages, "images": images, "label": "4"}) + "\n")
    return path


def check(sample: Sample, images: list[Image], judge: Judge) -> None:
    """Check that a sample has its images, and log-probs as transformers has them."""
    processor = judge.processor
    assert sample.images == [image.digest for image in images]
    assert sample.image_tokens == processor.added([(i.width, i.height) for i in images])
    prompt = sample.tokens[: sample.prompt_length]
    assert int((prompt == processor.placeholder).sum()) == len(images)
    assert {span.version for span in sample.weight_versions} == {0}
    response = sample.tokens[sample.prompt_length :].tolist()
    if processor.placeholder in response:  # transformers would look for another image
        response = response[: response.index(processor.placeholder)]
    if response:
        expected = judge.log_probs(prompt, images, response)
        log_probs = sample.rollout_log_probs[: len(response)].tolist()
        assert distance(log_probs, expected) < TOLERANCE


async def test_samples_of_images_travel_from_lease_to_batch(
    tmp_path: Path, model: Path, engine: Client, judge: Judge, rendezvous: Rendezvous
) -> None:
    source = {"path": str(rows(tmp_path))}
    spec = job(
        tmp_path,
        model,
        data={"prompts": [source], "images": {}, "shuffle": False},
        evaluation={"datasets": [{**source, "name": "held-out"}]},
        trainer={"backend": "fsdp", "steps": 1},
    )
    services = Services(spec, tmp_path, rendezvous)
    async with await services.start_buffer() as client, services.working(engine) as (worker, end):
        made = submitted(worker)
        assert (await client.take(1, wait=DEADLINE)).state == READY
        batch = [codec.group_from_message(group) for group in await client.shard(1)]
        await end()
    assert {group.prompt.purpose for group in made} == {*Purpose}
    for group in made:
        if group.prompt.row == 3:
            assert {sample.status for sample in group.samples} == {SampleStatus.FAILED}
            assert "2 placeholders <|image_pad|> for 1 images" in group.samples[0].error
    kept = [group for group in [*made, *batch] if group.prompt.row < 3]
    assert {group.prompt.row for group in kept} == {0, 1, 2}
    for group in kept:
        for sample in group.samples:
            check(sample, OF_ROWS[group.prompt.row], judge)


async def test_a_returned_sample_goes_on_with_its_images(
    tmp_path: Path,
    model: Path,
    engine: Client,
    server: Sglang,
    judge: Judge,
    rendezvous: Rendezvous,
) -> None:
    source = {"path": str(rows(tmp_path))}
    spec = job(
        tmp_path,
        model,
        data={"prompts": [source], "images": {}, "shuffle": False},
        rollout={"batchSize": 2, "sampling": {"maxResponseTokens": 400}},
        trainer={"backend": "fsdp", "steps": 1},
    )
    services = Services(spec, tmp_path, rendezvous)
    async with await services.start_buffer() as client:
        async with services.working(engine) as (_, end):
            await server.generated(4 * 30)
            await end()
        leased = (await client.lease("rollout-1", count=2)).groups
        partial = [codec.group_from_message(group.partial) for group in leased]
        assert any(s.status is SampleStatus.ABORTED for g in partial for s in g.samples)
        returned = [
            SampleGroup(codec.prompt_from_message(lease.prompt), group.samples)
            for lease, group in zip(leased, partial, strict=True)
        ]
        await client.give_back([codec.group_to_message(group) for group in returned])
        async with services.working(engine):
            assert (await client.take(1, wait=DEADLINE)).state == READY
        batch = [codec.group_from_message(group) for group in await client.shard(1)]
    # A group whose responses had all ended before the drain was not returned.
    begun = {group.prompt.row: group.samples for group in returned}
    for group in batch:
        for sample in group.samples:
            check(sample, OF_ROWS[group.prompt.row], judge)
        for part, whole in zip(begun.get(group.prompt.row, []), group.samples, strict=False):
            assert whole.tokens.tolist()[: len(part.tokens)] == part.tokens.tolist()
