"""Agents that send images to a real engine's gateway: what it saw and sampled is what is trained.

A real buffer keeps the images, and transformers judges the log-probs of each turn.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJob
from sluice.engines.protocol import Client
from sluice.images.image import Image
from sluice.samples.sample import Sample, SampleGroup, SampleStatus, TokenSequence
from sluice.samples.turns import records_of
from sluice.wire import codec
from sluice.wire.buffer_locator import BufferLocator
from sluice.wire.image_client import ImageClient
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.prompts import PromptEncoder
from tests.integration.engines import distance
from tests.integration.rendezvous_server import DEADLINE, Rendezvous
from tests.integration.rollout.image_agent import STEPS, asks_long
from tests.integration.rollout.pods import Services, job
from tests.integration.rollout.test_images import OF_ROWS, TOLERANCE, rows
from tests.integration.rollout.test_images import engine as engine
from tests.integration.rollout.test_images import judge as judge
from tests.integration.rollout.test_images import model as model
from tests.integration.rollout.test_images import server as server
from tests.integration.vision_judge import Judge

READY = pb.TakeBatchResponse.STATE_READY
# Images are of three rows, with one image, two and none.
ROWS = 3
SAMPLES = 2
# Ends of a random model's turns, so that they are short.
STOPS = ["a", "e", "i", "o", "u", "0", "1", "2"]


@pytest.fixture
def make_services(
    tmp_path: Path, model: Path, rendezvous: Rendezvous
) -> Iterator[Callable[..., Services]]:
    """Make the services of a job, whose buffer ends with the test."""
    made: list[Services] = []

    def make(**rollout: Any) -> Services:
        made.append(Services(agents_job(tmp_path, model, **rollout), tmp_path, rendezvous))
        return made[-1]

    yield make
    for services in made:
        services.buffer.end(signal.SIGKILL)


def agents_job(directory: Path, model: Path, **rollout: Any) -> RLJob:
    """Three prompts, whose episodes an agent with screenshots plays at the gateway."""
    path = rows(directory)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:ROWS]))
    return job(
        directory,
        model,
        data={"prompts": [{"path": str(path)}], "images": {}, "shuffle": False},
        rollout={
            "batchSize": ROWS,
            "samplesPerPrompt": SAMPLES,
            "concurrency": 8,
            "function": "tests.integration.rollout.image_agent.play",
            "sampling": {"maxResponseTokens": 400},
            **rollout,
        },
        trainer={"backend": "fsdp", "steps": 1},
    )


def check_turns(
    sequence: TokenSequence,
    records: list[dict[str, object]],
    images: dict[str, Image],
    judge: Judge,
    media_tokens: frozenset[int],
) -> None:
    """Check each turn that a sequence trains against transformers, given the images before it."""
    placeholder = judge.processor.placeholder
    tokens, at = sequence.tokens.tolist(), sequence.prompt_length
    for record in records:
        start, at = at, at + int(str(record["length"]))
        first = start - sequence.prompt_length
        if not sequence.loss_mask[first : at - sequence.prompt_length].any():
            continue  # the environment's, or trained in an earlier branch
        turn = tokens[start:at]
        # transformers would look for images behind sampled tokens that stand for them.
        turn = turn[: next((i for i, token in enumerate(turn) if token in media_tokens), None)]
        before = [images[d] for d in sequence.images[: tokens[:start].count(placeholder)]]
        if turn:
            expected = judge.log_probs(tokens[:start], before, turn)
            reported = sequence.rollout_log_probs[first : first + len(turn)].tolist()
            assert distance(reported, expected) < TOLERANCE
    assert at == len(tokens)


async def check(
    sample: Sample, row: list[Image], judge: Judge, store: ImageClient, media: frozenset[int]
) -> None:
    """Check the images of a sample of the agent, which the buffer has, and all of its turns."""
    assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED), sample.error
    placeholder = judge.processor.placeholder
    for sequence, records in zip(sample.sequences, records_of(sample.metadata), strict=True):
        stored = await store.get(sequence.images)
        images = {image.digest: image for image in stored}
        assert sequence.images[: len(row)] == [image.digest for image in row]
        assert sequence.image_tokens == judge.processor.added([(i.width, i.height) for i in stored])
        given = sequence.tokens.copy()
        given[sequence.prompt_length :][sequence.loss_mask == 1] = -1
        assert int((given == placeholder).sum()) == len(sequence.images)
        check_turns(sequence, records, images, judge, media)


async def trained(
    services: Services, model: Path, engine: Client, judge: Judge, rendezvous: Rendezvous
) -> list[SampleGroup]:
    """Return the groups of a step, all of whose samples are right."""
    media = PromptEncoder(services.job.spec, model).media_tokens
    async with await services.start_buffer() as client, services.working(engine) as (_, end):
        assert (await client.take(1, wait=3 * DEADLINE)).state == READY
        batch = [codec.group_from_message(group) for group in await client.shard(1)]
        await end()
        store = ImageClient(BufferLocator(rendezvous.address))
        for group in batch:
            for sample in group.samples:
                await check(sample, OF_ROWS[group.prompt.row], judge, store, media)
    return batch


async def test_agents_with_screenshots_are_trained_on_what_the_engine_saw(
    make_services: Callable[..., Services],
    model: Path,
    engine: Client,
    judge: Judge,
    rendezvous: Rendezvous,
) -> None:
    batch = await trained(make_services(), model, engine, judge, rendezvous)
    assert {group.prompt.row for group in batch} == {*range(ROWS)}
    # A random model may sample a placeholder, which ends an episode before its second branch.
    whole = [sample for group in batch for sample in group.samples if sample.branches]
    assert whole
    for sample in whole:
        assert len(sample.images) >= STEPS
        last = {sequence.images[-1] for sequence in sample.sequences}
        assert len(last) == 2, "one branch for each image of the last step"


async def test_a_tool_shows_the_engine_what_is_trained(
    make_services: Callable[..., Services],
    model: Path,
    engine: Client,
    judge: Judge,
    rendezvous: Rendezvous,
) -> None:
    services = make_services(
        function="tests.integration.rollout.image_agent.look",
        sampling={"maxResponseTokens": 400, "stop": STOPS},
    )
    batch = await trained(services, model, engine, judge, rendezvous)
    shown = [
        len(sample.images) - len(OF_ROWS[group.prompt.row])
        for group in batch
        for sample in group.samples
    ]
    # A random model may sample a placeholder, which ends an episode.
    assert max(shown) == STEPS


async def test_an_agent_that_is_interrupted_goes_on_from_its_images(
    make_services: Callable[..., Services],
    model: Path,
    engine: Client,
    judge: Judge,
    rendezvous: Rendezvous,
) -> None:
    services = make_services(
        partial={"enabled": True},
        mode="async",
        maxStaleness=1,
        function="tests.integration.rollout.image_agent.play_slowly",
    )
    asks_long.clear()
    media = PromptEncoder(services.job.spec, model).media_tokens
    async with await services.start_buffer() as client:
        store = ImageClient(BufferLocator(rendezvous.address))
        async with services.working(engine) as (_, end):
            async with asyncio.timeout(DEADLINE):
                await asks_long.wait()
            await end()
        leased = (await client.lease("rollout-1", count=ROWS)).groups
        returned = [
            SampleGroup(
                codec.prompt_from_message(lease.prompt),
                codec.group_from_message(lease.partial).samples,
            )
            for lease in leased
        ]
        aborted = [
            (group.prompt.row, sample)
            for group in returned
            for sample in group.samples
            if sample.status is SampleStatus.ABORTED
        ]
        assert any(len(sample.images) > len(OF_ROWS[row]) for row, sample in aborted)
        for _, sample in aborted:
            assert len(await store.get(sample.images)) == len(sample.images)
        await client.give_back([codec.group_to_message(group) for group in returned])
        async with services.working(engine):
            assert (await client.take(1, wait=3 * DEADLINE)).state == READY
            batch = [codec.group_from_message(group) for group in await client.shard(1)]
        finished = {(g.prompt.row, s.index): s for g in batch for s in g.samples}
        for row, part in aborted:
            whole = finished[row, part.index]
            await check(whole, OF_ROWS[row], judge, store, media)
            assert any(
                sequence.tokens.tolist()[: len(part.tokens)] == part.tokens.tolist()
                for sequence in whole.sequences
            )
