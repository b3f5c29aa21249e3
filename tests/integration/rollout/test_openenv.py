"""Environments of OpenEnv behind a real server of its package, played by a real engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sluice.api.groups.environment import OpenEnvironment
from sluice.api.groups.episode import EpisodeLimits
from sluice.engines.sglang.client import Client
from sluice.runtime.pod_env import free_port
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import TIMED_OUT, turn_rewards
from sluice_rollout.environments.openenv import OpenEnv, ServerLostError, openenv_of
from sluice_rollout.environments.openenv_session import ServerError, open_session
from sluice_rollout.episode import Episode
from sluice_rollout.health import EngineLostError
from sluice_rollout.scoring import seat_rewards
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests.integration.rollout.test_gateway import (
    CALLING,
    PARAMS,
    RequestLog,
    check_tokens,
    runner_at_gateway,
)
from tests.integration.rollout.test_gateway import talkative as talkative
from tests.tools import missing

OPENENV_PYTHON = Path(
    os.environ.get("SLUICE_OPENENV_PYTHON") or Path(sys.prefix).parent / ".venv-openenv/bin/python"
)


@dataclass(frozen=True)
class Servers:
    """A process that serves an environment of words and one of tools."""

    process: subprocess.Popen[bytes]
    ports: tuple[int, int]
    server_log: Path


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Servers]:
    if not OPENENV_PYTHON.exists():
        missing("needs OpenEnv: make agents")
    ports, server_log = (free_port(), free_port()), directory / "servers.log"
    file = Path(__file__).with_name("openenv_server.py")
    words = [str(OPENENV_PYTHON), "-P", str(file), *map(str, ports)]
    with server_log.open("wb") as written, subprocess.Popen(words, stderr=written) as process:
        try:
            for port in ports:
                wait_for(f"http://127.0.0.1:{port}")
            yield Servers(process, ports, server_log)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the addresses of an environment of words, and of one of tools."""
    with serving(tmp_path_factory.mktemp("servers")) as both:
        words, tools = (f"http://127.0.0.1:{port}" for port in both.ports)
        yield words, tools


def wait_for(address: str) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        time.sleep(0.1)
    raise AssertionError(f"{address} does not start")


@contextlib.asynccontextmanager
async def openenv_runner(
    url: str, engine: Client, talkative: Path, directory: Path, **settings: Any
) -> AsyncIterator[EpisodeRunner]:
    play = openenv_of(OpenEnvironment(url=url, **settings), "tiny")
    async with runner_at_gateway(play, engine, talkative, directory) as runner:
        yield runner


async def test_words_are_actions_until_the_environment_is_done(
    servers: tuple[str, str], engine: Client, talkative: Path, tmp_path: Path
) -> None:
    log = RequestLog(engine)
    async with openenv_runner(servers[0], engine, talkative, tmp_path) as runner:
        sample = await runner(Prompt(7, "w0008"), [5], Sample(0), CALLING)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    check_tokens(sample, log)
    assert turn_rewards(sample) == {"": [0.25, 0.5, 0.75]}
    seat_rewards.settle(sample)
    assert sample.reward == 1.5


async def test_tools_of_the_environment_are_the_models(
    servers: tuple[str, str], engine: Client, talkative: Path, tmp_path: Path
) -> None:
    log = RequestLog(engine)
    async with openenv_runner(servers[1], engine, talkative, tmp_path) as runner:
        sample = await runner(Prompt(7, "w0008"), [5], Sample(0), CALLING)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    check_tokens(sample, log)
    assert sample.metadata["tool_calls"] == 3
    assert turn_rewards(sample) == {"": [0.5] * 3}


async def test_rewards_of_turns_stay_when_the_episodes_time_has_passed(
    servers: tuple[str, str], engine: Client, talkative: Path, tmp_path: Path
) -> None:
    held: list[Episode] = []

    def last(message: dict[str, Any], observation: dict[str, Any]) -> dict[str, Any]:
        held[0].time_limit.over.set()
        return {"message": "w0001"}

    async def play(episode: Episode) -> None:
        held.append(episode)
        await OpenEnv(OpenEnvironment(url=servers[0]), "tiny", last)(episode)

    async with runner_at_gateway(play, engine, talkative, tmp_path) as runner:
        runner.limits = EpisodeLimits(seconds=600.0)
        sample = await runner(Prompt(7, "w0008"), [5], Sample(0), CALLING)
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert "rollout.limits.seconds" in sample.metadata[TIMED_OUT]
    assert turn_rewards(sample) == {"": [0.25]}


async def test_the_reason_of_a_refused_action_is_for_the_model(
    servers: tuple[str, str],
) -> None:
    async with open_session(servers[0], 10.0) as (session, schema):
        assert schema["required"] == ["message"]
        first = await session.reset({"seed": 3, "unknown": True})
        assert (first.observation, first.reward, first.done) == ({"word": "seed 3"}, 0, False)
        for action, words in (({"message": ""}, "say something"), ({"letter": 1}, "message")):
            with pytest.raises(Exception, match=words) as raised:
                await session.step(action)
            assert type(raised.value).__name__ == "RefusedActionError"


async def test_a_full_server_is_asked_again(servers: tuple[str, str]) -> None:
    async with open_session(servers[0], 10.0), contextlib.AsyncExitStack() as second:
        await second.enter_async_context(open_session(servers[0], 10.0))
        with pytest.raises(ServerError, match=r"no session in 0.5 s: .*"):
            async with open_session(servers[0], 0.5):
                pass
        waiting = asyncio.create_task(leave(servers[0]))
        await asyncio.sleep(0.5)
        await second.aclose()
        await waiting


async def leave(url: str) -> None:
    async with open_session(url, 30.0) as (session, _):
        await session.reset({})


async def test_an_unreachable_server_fails_the_sample(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with openenv_runner(url, engine, talkative, tmp_path, timeout_seconds=0.5) as runner:
        sample = await runner(Prompt(7, "w0008"), [5], Sample(0), PARAMS)
    assert sample.status is SampleStatus.FAILED
    assert "failed: no session in 0.5 s: ClientConnectorError: Cannot connect" in sample.error


async def test_a_session_that_ends_leaves_no_traceback_in_the_servers_log(tmp_path: Path) -> None:
    with serving(tmp_path) as both:
        for _ in range(8):
            async with open_session(f"http://127.0.0.1:{both.ports[0]}", 30.0) as (session, _):
                await session.reset({})
        both.process.terminate()
        both.process.wait(30)
        assert "Traceback" not in both.server_log.read_text()


async def test_a_server_that_ends_in_this_pod_sends_the_group_back(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    with serving(tmp_path) as both:

        def killing(message: dict[str, Any], observation: dict[str, Any]) -> dict[str, Any]:
            both.process.kill()
            both.process.wait()
            return {"message": "w0001"}

        settings = OpenEnvironment(image="server:1", port=both.ports[0])
        play = OpenEnv(settings, "tiny", killing)
        async with runner_at_gateway(play, engine, talkative, tmp_path) as runner:
            with pytest.raises(ServerLostError, match="the server in this pod has ended: "):
                await runner(Prompt(7, "w0008"), [5], Sample(0), CALLING)


async def test_a_server_that_ends_with_its_pod_is_no_failure(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    """All containers of the pod are told to end at once. The server may be the first to end."""
    with serving(tmp_path) as both:
        async with contextlib.AsyncExitStack() as stack:

            def ending(message: dict[str, Any], observation: dict[str, Any]) -> dict[str, Any]:
                both.process.kill()
                both.process.wait()
                asyncio.get_running_loop().call_later(0.5, runner.generator.draining.set)
                return {"message": "w0001"}

            play = OpenEnv(OpenEnvironment(image="server:1", port=both.ports[0]), "tiny", ending)
            runner = await stack.enter_async_context(
                runner_at_gateway(play, engine, talkative, tmp_path)
            )
            sample = await runner(Prompt(7, "w0008"), [5], Sample(0), CALLING)
    assert (sample.status, sample.error) == (SampleStatus.ABORTED, "")


async def test_a_server_that_never_listens_in_this_pod_ends_the_worker(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    """The samples are not to blame, however often the server is started."""
    settings = OpenEnvironment(image="server:1", port=free_port(), timeout_seconds=0.5)
    async with runner_at_gateway(OpenEnv(settings, "tiny"), engine, talkative, tmp_path) as runner:
        with pytest.raises(EngineLostError, match="the server has not listened at http") as lost:
            await runner(Prompt(7, "w0008"), [5], Sample(0), PARAMS)
    assert not lost.value.blames
