"""Episodes in pods: the worker's side and the sidecar, with a real engine. Their containers are
processes here; tests/node has real pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from sluice.engines.sglang.client import Client
from sluice.samples.episode_protocol import ROW
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.environments.pod_pool import EpisodePodError
from sluice_rollout.environments.pods import EpisodePods
from sluice_rollout.gateway.registry import EpisodeRegistry, PodAddress
from sluice_rollout.gateway.server import LOOPBACK
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests.integration.rollout.pod_process import SECONDS, TOKEN, Pod
from tests.integration.rollout.pods import job
from tests.integration.rollout.test_gateway import PARAMS, RequestLog, check, check_tokens
from tests.integration.rollout.test_gateway import talkative as talkative
from tests.integration.rollout.test_generation import generator


def agent(*arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("episode_program.py")), *arguments]


@contextlib.asynccontextmanager
async def worker(
    engine: Client,
    talkative: Path,
    directory: Path,
    seconds: float = SECONDS,
    pod_seconds: float = 2 * SECONDS,
) -> AsyncIterator[tuple[EpisodeRunner, str]]:
    """Make a runner whose episodes are pods. Yields it with the address to join."""
    environment = {"command": ["agent"], "image": "agent:1", "pods": 2}
    spec = job(
        directory,
        talkative,
        rollout__sampling__maxResponseTokens=900,
        rollout__environment=environment,
    ).spec
    encoder = PromptEncoder(spec, talkative)
    pods = EpisodePods.create(TOKEN, pod_seconds, "kubectl")
    address = PodAddress(LOOPBACK, 0, pods.join)
    async with EpisodeRegistry.for_job(spec, encoder, address) as registry:
        runner = EpisodeRunner(
            pods,
            "the program",
            generator(engine, talkative),
            encoder.tokenizer,
            seconds,
            None,
            registry.open_gateway,
        )
        yield runner, f"http://{LOOPBACK}:{registry.server.port}"


@pytest.mark.parametrize("arguments", [(), ("stream",)], ids=["whole", "streaming"])
async def test_an_episode_in_a_pod_is_the_tokens_that_the_engine_sampled(
    arguments: tuple[str, ...], engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    log = RequestLog(engine)
    async with worker(engine, talkative, tmp_path) as (runner, address):
        with Pod(tmp_path / "pod", address, agent(*arguments)) as pod:
            sample = await runner(Prompt(0, "?", label="0.5"), [5], Sample(0), PARAMS)
            assert await pod.ends() == 0
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert sample.reward == 0.5
    assert sample.metadata["messages"] > 6
    check_tokens(sample, log)
    check(sample, {0: model})


async def test_a_program_without_a_result_is_left_to_the_reward(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    async with worker(engine, talkative, tmp_path) as (runner, address):
        with Pod(tmp_path / "pod", address, agent("silent")):
            sample = await runner(Prompt(0, "?"), [5], Sample(0), PARAMS)
    assert (sample.status, sample.reward) == (SampleStatus.TRUNCATED, None)


async def test_a_chat_of_a_million_tokens_reaches_its_pod(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    async with worker(engine, talkative, tmp_path) as (runner, address):
        with Pod(tmp_path / "pod", address, agent("silent")) as pod:
            prompt = Prompt(0, "?", metadata={"document": "word " * 2**22})
            sample = await runner(prompt, [5], Sample(0), PARAMS)
            assert json.loads((pod.directory / ROW).read_text())["metadata"] == prompt.metadata
    assert sample.status is SampleStatus.TRUNCATED


async def test_a_row_that_is_too_large_fails_its_sample(
    engine: Client, talkative: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(engine, talkative, tmp_path) as (runner, address):
        with Pod(tmp_path / "pod", address, agent()):
            monkeypatch.setattr("sluice.samples.episode_protocol.MOST_BYTES", 1000)
            prompt = Prompt(0, "?", metadata={"document": "word " * 200})
            sample = await runner(prompt, [5], Sample(0), PARAMS)
    assert sample.status is SampleStatus.FAILED
    assert re.search(r"row of \d{4} bytes: at most 1000 can be sent to a pod", sample.error)


async def test_a_result_that_is_too_long_fails_its_sample(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    async with worker(engine, talkative, tmp_path) as (runner, address):
        with Pod(tmp_path / "pod", address, agent("flood")):
            sample = await runner(Prompt(0, "?", label="1"), [5], Sample(0), PARAMS)
    assert sample.status is SampleStatus.FAILED
    assert "result.json: expected a plain file of at most 4194304 bytes" in sample.error


async def test_the_error_of_a_failed_program_is_in_its_sample(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    async with worker(engine, talkative, tmp_path) as (runner, address):
        with Pod(tmp_path / "pod", address, agent("raise")):
            sample = await runner(Prompt(0, "?"), [5], Sample(0), PARAMS)
    assert sample.status is SampleStatus.FAILED
    assert sample.error.startswith("the program ended with status 1: RuntimeError: no such tool")


async def test_a_program_that_hangs_fails_its_sample(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    async with worker(engine, talkative, tmp_path, seconds=3.0) as (runner, address):
        with Pod(tmp_path / "pod", address, agent("hang")) as pod:
            sample = await runner(Prompt(0, "?", label="1"), [5], Sample(0), PARAMS)
            assert await pod.ends() == 0, "and who made the pod takes it away"
    assert sample.status is SampleStatus.FAILED
    assert "took more than 3 s outside of the engine" in sample.error


async def test_a_program_that_is_killed_fails_its_sample(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    """Say for its memory; then its pod is taken away."""
    async with worker(engine, talkative, tmp_path) as (runner, address):
        with Pod(tmp_path / "pod", address, agent("hang")) as pod:
            playing = asyncio.create_task(runner(Prompt(0, "?"), [5], Sample(0), PARAMS))
            await pod.plays()
            pod.sidecar.send_signal(signal.SIGTERM)
            sample = await playing
    assert (sample.status, sample.error) == (
        SampleStatus.FAILED,
        "the program was ended by SIGKILL",
    )


async def test_a_deleted_pod_does_not_fail_the_sample(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    """Both containers are told to end, as by a deletion, a drained node or a preemption."""
    async with worker(engine, talkative, tmp_path) as (runner, address):
        with Pod(tmp_path / "pod", address, agent("hang")) as pod:
            playing = asyncio.create_task(runner(Prompt(0, "?"), [5], Sample(0), PARAMS))
            await pod.plays()
            pod.sidecar.send_signal(signal.SIGTERM)
            pod.program.send_signal(signal.SIGTERM)
            with pytest.raises(EpisodePodError, match="job-episode-0-1-0-1 was lost before"):
                await playing
            assert await asyncio.to_thread(pod.program.wait, SECONDS) == 143


async def test_a_lost_pod_does_not_fail_the_sample(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    async with worker(engine, talkative, tmp_path) as (runner, address):
        with Pod(tmp_path / "pod", address, agent("hang")) as pod:
            playing = asyncio.create_task(runner(Prompt(0, "?"), [5], Sample(0), PARAMS))
            await pod.plays()
            pod.sidecar.kill()
            with pytest.raises(EpisodePodError, match="job-episode-0-1-0-1 was lost before"):
                await playing


async def test_an_episode_without_a_pod_says_where_to_look(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    async with worker(engine, talkative, tmp_path, pod_seconds=0.5) as (runner, _):
        with pytest.raises(EpisodePodError, match="no episode pod was free within"):
            await runner(Prompt(0, "?"), [5], Sample(0), PARAMS)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        pytest.param("/episode-pods", "episode", id="a pod with another token"),
        pytest.param("/v1/models", "episode", id="the key that programs see"),
        pytest.param("/v1/models", TOKEN, id="the token of pods"),
    ],
)
async def test_requests_with_a_wrong_key_are_refused(
    path: str, key: str, engine: Client, talkative: Path, tmp_path: Path
) -> None:
    async with worker(engine, talkative, tmp_path) as (_, address), aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {key}"}
        async with http.get(f"{address}{path}", headers=headers) as answer:
            assert answer.status == 401
