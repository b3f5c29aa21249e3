"""Helpers of tests at the gateway: a running registry, and episodes at a scripted engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from prometheus_client import REGISTRY

from sluice.samples.sample import Prompt, Sample
from sluice_rollout.episode import Play
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.gateway.registry import EpisodeRegistry
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests import chat
from tests.unit.buffer.buffer_tools import make_job
from tests.unit.rollout.scripted_engine import PARAMS, Script, scripted_runner

CHAT_BODY: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


def token_ids(text: str) -> list[int]:
    """Encode a text with the tests\' tokenizer."""
    return [int(i) for i in chat.tokenizer().encode(text, add_special_tokens=False)]


@contextlib.asynccontextmanager
async def open_registry(directory: Path, **changes: Any) -> AsyncIterator[EpisodeRegistry]:
    """Open the registry of a job, with `changes` to its specification."""
    chat.save(directory / "model")
    job: dict[str, Any] = {"model__path": str(directory / "model")}
    spec = make_job(directory, **job, rollout__function="play.py:play", **changes).spec
    async with EpisodeRegistry.for_job(spec, PromptEncoder(spec, directory / "model")) as registry:
        yield registry


def episode_runner(registry: EpisodeRegistry, play: Play, engine: Script) -> EpisodeRunner:
    """Make a runner whose episodes use the registry\'s gateway and tokenizer."""
    runner = scripted_runner(play, engine)
    runner.open_gateway, runner.tokenizer = registry.open_gateway, registry.encoder.tokenizer
    runner.generator.decode = registry.encoder.decode
    runner.image_gate = registry.image_gate
    if processor := registry.encoder.image_processor:
        runner.generator.placeholder = processor.placeholder
    return runner


async def play_episode(
    registry: EpisodeRegistry, play: Play, engine: Script, tokens: int = 100
) -> Sample:
    """Play one episode with room for `tokens` tokens."""
    params = PARAMS | {"max_new_tokens": tokens}
    return await episode_runner(registry, play, engine)(Prompt(3, "?"), [1], Sample(0), params)


def openai_client(gateway: Gateway, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.api_key, **options)


def counter_value(name: str, **labels: str) -> float:
    """Return the value of one of the gateway\'s counters."""
    return REGISTRY.get_sample_value(f"sluice_rollout_gateway_{name}_total", labels) or 0.0


async def post(url: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Post a request that is refused. Returns the status and the error."""
    async with aiohttp.ClientSession() as session, session.post(url, **options) as answer:
        body = await answer.json()
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return answer.status, body["error"]
