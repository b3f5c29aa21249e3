"""Plays episodes in environments of OpenEnv (`rollout.environment.openenv`).

The environment is reset. Then the model's actions and the environment's observations take turns
until the environment is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from sluice.api.groups.environment import OpenEnvironment
from sluice.engines.protocol import EngineError
from sluice.runtime import error_summary, user_code
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt
from sluice_rollout.environments import openenv_text as text
from sluice_rollout.environments.openenv_session import (
    OpenEnvSession,
    RefusedActionError,
    ServerError,
    StepResult,
    UnreachableError,
    is_listening,
    open_session,
)
from sluice_rollout.episode import Episode, PlayFailedError
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.gateway.interfaces.errors import TOO_LONG, too_long
from sluice_rollout.health import EngineLostError

RESET = "reset"  # key of a row's metadata: options of the environment's reset, such as a seed
_FIELD = "spec.rollout.environment.openenv"
# A server may end because its pod does. Within this time the worker gets the signal as well.
_LAST_SECONDS = 2.0
Message = dict[str, Any]
# The user's function: (the model's message, the observation before it) -> action.
ToAction = Callable[[Message, dict[str, Any]], dict[str, Any]]


class ServerLostError(EngineError):
    """The server in this pod has ended.

    This may not be the episode's fault, so its group is played again.
    """


@dataclass(frozen=True, slots=True)
class OpenEnv:
    """Plays each episode in an environment behind a URL."""

    settings: OpenEnvironment
    model: str  # name of the model
    to_action: ToAction | None = None

    @property
    def name(self) -> str:
        """Name of the environment in messages."""
        return f"openenv {self.settings.image or self.settings.url}"

    async def __call__(self, episode: Episode) -> None:
        """Play an episode.

        Raises
        ------
        PlayFailedError
            The server failed.
        EngineError
            The server runs in this pod and has ended.
        GatewayError
            The history is too long.

        """
        url, seconds = self.settings.address.rstrip("/"), self.settings.timeout_seconds
        try:
            async with (
                open_session(url, seconds) as (session, schema),
                aiohttp.ClientSession() as http,
            ):
                step = await session.reset(options_of(episode.prompt))
                play = _EpisodePlay(self, episode, session, schema, episode.gateway, http, step)
                await play.run()
        except ServerError as error:
            raise await self._episode_error(error, url) from error

    async def _episode_error(self, error: ServerError, url: str) -> Exception:
        """Return the error that ends an episode whose server failed."""
        if self.settings.image is not None:
            if isinstance(error, UnreachableError):
                return EngineLostError(
                    f"{_FIELD}: the server has not listened at {url} in this pod for "
                    f"{self.settings.timeout_seconds:g} s: see the log of the container openenv; "
                    "port has to be the one that its server listens on, and timeoutSeconds longer "
                    "than its start takes",
                    blames=False,
                )
            if not await is_listening(url):
                await asyncio.sleep(_LAST_SECONDS)
                return ServerLostError(f"{_FIELD}: the server in this pod has ended: {error}")
        return PlayFailedError("environment", f"failed: {error}")


def openenv_of(settings: OpenEnvironment, model: str) -> OpenEnv:
    """Make the environment of a job. Raises ConfigurationError if its function cannot be loaded."""
    if settings.function is None:
        return OpenEnv(settings, model)
    try:
        return OpenEnv(settings, model, user_code.load(settings.function))
    except user_code.LoadError as error:
        raise ConfigurationError(f"{_FIELD}.function: {error}") from error


def options_of(prompt: Prompt) -> dict[str, Any]:
    """Return the options for an environment's reset.

    All samples of a prompt have the same seed, so that they can be compared.
    """
    return {"seed": prompt.group_id} | (prompt.metadata.get(RESET) or {})


@dataclass(slots=True)
class _EpisodePlay:
    """An episode that is being played."""

    environment: OpenEnv
    episode: Episode
    session: OpenEnvSession
    schema: dict[str, Any]
    gateway: Gateway
    http: aiohttp.ClientSession
    step: StepResult

    async def run(self) -> None:
        tools = await self._tools()
        messages = text.opening(self.episode.prompt.prompt, self._observation_text())
        while not self.step.done:
            answer = await self._answer(messages, tools)
            messages.append(answer)
            if tools and not answer.get("tool_calls") and self.environment.to_action is None:
                break  # the model calls no tool: this is its final answer
            messages += await self._respond(answer)
        self.episode.reward(0.0)  # turns carry the rewards

    async def _tools(self) -> list[dict[str, Any]]:
        if not text.has_tools(self.schema):
            return []
        try:
            listed = await self.session.step(text.LIST_TOOLS)
        except RefusedActionError as error:
            raise ServerError(f"the server does not list its tools: {error}") from error
        return text.definitions(listed.observation.get("tools") or [])

    async def _respond(self, answer: Message) -> list[Message]:
        """Take the model's actions. Returns the messages that answer it."""
        calls = [] if self.environment.to_action else answer.get("tool_calls") or []
        if not calls:
            return [{"role": "user", "content": await self._take_action(self._action, answer)}]
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": await self._take_action(text.call_of, call),
            }
            for call in calls
        ]

    def _action(self, answer: Message) -> dict[str, Any]:
        if self.environment.to_action is None:
            words = answer.get("content") or ""
            return text.action_of(words, self.schema, self.environment.settings.action)
        try:
            return self.environment.to_action(answer, self.step.observation)
        except Exception as error:  # the user's function may raise anything
            message = f"{self.environment.settings.function} raised {error_summary.cause(error)}"
            raise PlayFailedError("raised", message) from error

    async def _take_action(
        self, read_action: Callable[[Message], dict[str, Any]], message: Message
    ) -> str:
        """Take one action. Returns the environment's answer, or why the action is refused."""
        if self.step.done:
            return "error: the episode has ended"
        try:
            self.step = await self.session.step(read_action(message))
        except (text.ActionError, RefusedActionError) as error:
            return f"error: {error}"
        if self.step.reward:
            self.episode.turn_reward(self.step.reward)
        is_call = read_action is text.call_of
        return text.result_of(self.step.observation) if is_call else self._observation_text()

    def _observation_text(self) -> str:
        return text.shown(self.step.observation, self.environment.settings.observation)

    async def _answer(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """Ask the model for its message. Raises GatewayError if the history does not fit."""
        body = {"model": self.environment.model, "messages": messages} | (
            {"tools": tools} if tools else {}
        )
        headers = {"Authorization": f"Bearer {self.gateway.api_key}"}
        url = f"{self.gateway.base_url}/chat/completions"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self.http.post(url, json=body, headers=headers, timeout=timeout) as response:
            document = await response.json()
        if response.status == 200:
            message: Message = document["choices"][0]["message"]
            return {k: message[k] for k in ("role", "content", "tool_calls") if message.get(k)}
        error = document["error"]
        if error["code"] == TOO_LONG:
            raise too_long(error["message"])
        raise PlayFailedError("gateway", f"was refused by the gateway: {error['message']}")
