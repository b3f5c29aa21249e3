"""Episodes in pods of their rows' images, with a scripted engine. Containers are processes here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.samples.episode_protocol import VERIFIER
from sluice.samples.sample import Sample, SampleStatus
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_rollout.environments.pods import EpisodePods, RowImages
from sluice_rollout.gateway.registry import EpisodeRegistry, PodAddress
from sluice_rollout.gateway.server import LOOPBACK
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests import chat
from tests.integration.rollout.pod_process import SECONDS, TOKEN, Pod
from tests.unit.buffer.buffer_tools import make_job
from tests.unit.environments.program_tools import python_command
from tests.unit.environments.test_verifier_pods import JUDGE, LEAVE, ROW, RULES
from tests.unit.gateway.gateway_tools import episode_runner, token_ids
from tests.unit.rollout.scripted_engine import PARAMS, Script

IMAGE = "me/a:1"
IMAGES = RowImages("{metadata.image}", "{metadata.image}", ("me/",), SECONDS)
PULL_SECONDS = 0.5


@contextlib.asynccontextmanager
async def worker(
    directory: Path, images: RowImages = IMAGES
) -> AsyncIterator[tuple[EpisodePods, EpisodeRunner, str]]:
    """Make a runner whose episodes are pods. Yields its pods, and the address to join."""
    model = directory / "model"
    chat.save(model)
    environment = {"command": ["agent"], "image": "{metadata.image}", "allowedImages": ["me/"]}
    spec = make_job(directory, model__path=str(model), rollout__environment=environment).spec
    pods = EpisodePods.create(TOKEN, 2 * SECONDS, "kubectl", RULES, images)
    async with EpisodeRegistry.for_job(
        spec, PromptEncoder(spec, model), PodAddress(LOOPBACK, 0, pods.join)
    ) as registry:
        runner = episode_runner(registry, pods, Script(token_ids("hello")))
        runner.name, runner.seconds = "the program", SECONDS
        yield pods, runner, f"http://{LOOPBACK}:{registry.server.port}"


async def play(runner: EpisodeRunner, **metadata: Any) -> Sample:
    row = replace(ROW, metadata=ROW.metadata | metadata)
    return await runner(row, [1], Sample(0), PARAMS | {"max_new_tokens": 100})


async def until_waiting(pods: EpisodePods, *expected: tuple[str, str, int]) -> None:
    async with asyncio.timeout(SECONDS):
        while waiting(pods) != list(expected):
            await asyncio.sleep(0.02)


def waiting(pods: EpisodePods) -> list[tuple[str, str, int]]:
    demand = pods.demand()
    return [(i.role, i.image, i.pods) for i in demand.waiting] if demand else []


async def report(pods: EpisodePods, *states: pb.EpisodePodState) -> None:
    for pool in (pods.episodes, pods.verifiers):
        await pool.note_states(states)


def state(pod: Pod, image_id: str) -> pb.EpisodePodState:
    return pb.EpisodePodState(pod=pod.name, image=pod.image, image_id=image_id)


async def test_an_episode_waits_for_a_pod_of_its_image(tmp_path: Path) -> None:
    """Pods of another image, and of none, have joined before. The sample has both digests."""
    async with worker(tmp_path) as (pods, runner, address):
        with Pod(tmp_path / "other", address, python_command(LEAVE), image="me/b:1") as other:
            while not pods.episodes.waiting:
                await asyncio.sleep(0.02)
            playing = asyncio.create_task(play(runner, image=IMAGE))
            await until_waiting(pods, ("episode", IMAGE, 1))
            assert await other.ends() == 0, "it made room for a pod of the image"
            with (
                Pod(tmp_path / "pod", address, python_command(LEAVE), image=IMAGE) as pod,
                Pod(tmp_path / "judge", address, python_command(JUDGE), VERIFIER, IMAGE) as judge,
            ):
                await report(pods, state(pod, "me/a@sha256:1"), state(judge, "me/a@sha256:2"))
                sample = await playing
    assert (sample.error, sample.reward) == ("", 0.25)
    assert sample.metadata["episode_image"] == "me/a@sha256:1"
    assert sample.metadata["verifier_image"] == "me/a@sha256:2"
    assert waiting(pods) == []


async def test_episodes_of_many_images_wait_at_once(tmp_path: Path) -> None:
    async with worker(tmp_path) as (pods, runner, _):
        images = [f"me/{number}:1" for number in range(200)]
        playing = [asyncio.create_task(play(runner, image=image)) for image in images]
        await until_waiting(pods, *(("episode", image, 1) for image in images))
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        assert waiting(pods) == []


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        pytest.param({}, "metadata.image: expected the name of an image", id="no image"),
        pytest.param({"image": 7}, "found 7", id="a number"),
        pytest.param({"image": "evil/a"}, "evil/a is not on the list", id="not allowed"),
    ],
)
async def test_a_row_without_a_usable_image_fails_its_sample(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    async with worker(tmp_path) as (_, runner, _address):
        sample = await play(runner, **metadata)
    assert sample.status is SampleStatus.FAILED
    assert sample.error.startswith("the program cannot have its image: ")
    assert message in sample.error


@pytest.mark.parametrize(
    ("seconds", "error", "message"),
    [
        pytest.param(
            SECONDS,
            'ErrImagePull: failed to pull "me/a:1": docker.io/me/a:1: not found',
            'cannot have its image me/a:1: ErrImagePull: failed to pull "me/a:1": docker.io',
            id="no such image",
        ),
        pytest.param(
            PULL_SECONDS,
            "ErrImagePull: 503 Service Unavailable",
            "cannot have its image me/a:1: after 0.5 s: ErrImagePull: 503 Service Unavailable",
            id="a registry that fails for long",
        ),
    ],
)
async def test_an_image_that_cannot_be_pulled_fails_its_sample(
    seconds: float, error: str, message: str, tmp_path: Path
) -> None:
    async with worker(tmp_path, replace(IMAGES, seconds=seconds)) as (pods, runner, _):
        playing = asyncio.create_task(play(runner, image=IMAGE))
        await until_waiting(pods, ("episode", IMAGE, 1))
        refused = pb.EpisodePodState(pod="a", image=IMAGE, error=error)
        other = pb.EpisodePodState(pod="b", image="me/b:1", error="InvalidImageName")
        await report(pods, other, refused)
        sample = await playing
    assert sample.status is SampleStatus.FAILED
    assert message in sample.error


async def test_an_image_is_pulled_after_a_registry_has_failed_for_a_while(tmp_path: Path) -> None:
    async with worker(tmp_path) as (pods, runner, address):
        playing = asyncio.create_task(play(runner, image=IMAGE))
        await until_waiting(pods, ("episode", IMAGE, 1))
        await report(pods, pb.EpisodePodState(pod="a", image=IMAGE, error="ErrImagePull: 503"))
        with (
            Pod(tmp_path / "pod", address, python_command(LEAVE), image=IMAGE) as pod,
            Pod(tmp_path / "judge", address, python_command(JUDGE), VERIFIER, IMAGE) as judge,
        ):
            await report(pods, state(pod, "me/a@sha256:1"), state(judge, "me/a@sha256:1"))
            assert (await playing).error == ""
