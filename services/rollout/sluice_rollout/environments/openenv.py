"""Plays episodes in environments of OpenEnv (`rollout.environment.openenv`): reset, then actions of
the model and observations of the environment in turn, until that is done.
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

RESET = "reset"
"""Key of a row's metadata: options that the environment is reset with, a seed, say."""
_FIELD = "spec.rollout.environment.openenv"
_LAST_SECONDS = 2.0
"""A server that ends may do so because its pod does: in this time the worker hears of that too."""
Message = dict[str, Any]
ToAction = Callable[[Message, dict[str, Any]], dict[str, Any]]
"""A user's function: (the model's message, the observation before it) -> the action."""


class ServerLostError(EngineError):
    """The server in this pod has ended. That may be no fault of an episode's: its group is played
    again.
    """


@dataclass(frozen=True, slots=True)
class OpenEnv:
    """Plays each episode in an environment behind a URL. model: its name."""

    settings: OpenEnvironment
    model: str
    to_action: ToAction | None = None

    @property
    def name(self) -> str:
        return f"openenv {self.settings.image or self.settings.url}"

    async def __call__(self, episode: Episode) -> None:
        """Play. Raises PlayFailedError where the server is to blame, EngineError where that is in
        this pod and gone, GatewayError where the history is too long.
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
            raise await self._blamed(error, url) from error

    async def _blamed(self, error: ServerError, url: str) -> Exception:
        """The error with which an episode ends whose server failed."""
        if self.settings.image is not None:
            if isinstance(error, UnreachableError):
                return EngineLostError(
                    f"{_FIELD}: nothing has listened at {url} in this pod for "
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
    """The environment of a job. Raises ConfigurationError where its function cannot be loaded."""
    if settings.function is None:
        return OpenEnv(settings, model)
    try:
        return OpenEnv(settings, model, user_code.load(settings.function))
    except user_code.LoadError as error:
        raise ConfigurationError(f"{_FIELD}.function: {error}") from error


def options_of(prompt: Prompt) -> dict[str, Any]:
    """The options that an episode's environment is reset with. All samples of a prompt have the
    same seed, so that they play the same and can be compared.
    """
    return {"seed": prompt.group_id} | (prompt.metadata.get(RESET) or {})


@dataclass(slots=True)
class _EpisodePlay:
    """One episode."""

    by: OpenEnv
    episode: Episode
    session: OpenEnvSession
    schema: dict[str, Any]
    gateway: Gateway
    http: aiohttp.ClientSession
    step: StepResult

    async def run(self) -> None:
        tools = await self._tools()
        messages = text.opening(self.episode.prompt.prompt, self._shown())
        while not self.step.done:
            answer = await self._answer(messages, tools)
            messages.append(answer)
            if tools and not answer.get("tool_calls") and self.by.to_action is None:
                break  # the last word
            messages += await self._act(answer)
        self.episode.reward(0.0)  # all of it is its turns'

    async def _tools(self) -> list[dict[str, Any]]:
        if not text.has_tools(self.schema):
            return []
        try:
            listed = await self.session.step(text.LIST_TOOLS)
        except RefusedActionError as error:
            raise ServerError(f"it does not list its tools: {error}") from error
        return text.definitions(listed.observation.get("tools") or [])

    async def _act(self, answer: Message) -> list[Message]:
        """Do what the model says; the messages that it is answered with."""
        calls = [] if self.by.to_action else answer.get("tool_calls") or []
        if not calls:
            return [{"role": "user", "content": await self._told(self._action, answer)}]
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": await self._told(text.call_of, call),
            }
            for call in calls
        ]

    def _action(self, answer: Message) -> dict[str, Any]:
        if self.by.to_action is None:
            words = answer.get("content") or ""
            return text.action_of(words, self.schema, self.by.settings.action)
        try:
            return self.by.to_action(answer, self.step.observation)
        except Exception as error:  # the user's function may raise anything
            message = f"{self.by.settings.function} raised {error_summary.cause(error)}"
            raise PlayFailedError("raised", message) from error

    async def _told(self, action_of: Callable[[Message], dict[str, Any]], said: Message) -> str:
        """The environment's answer to an action, or why it cannot take it."""
        if self.step.done:
            return "error: the episode has ended"
        try:
            self.step = await self.session.step(action_of(said))
        except (text.ActionError, RefusedActionError) as error:
            return f"error: {error}"
        if self.step.reward:
            self.episode.turn_reward(self.step.reward)
        is_call = action_of is text.call_of
        return text.result_of(self.step.observation) if is_call else self._shown()

    def _shown(self) -> str:
        return text.shown(self.step.observation, self.by.settings.observation)

    async def _answer(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """The model's message. Raises GatewayError where the history does not fit."""
        body = {"model": self.by.model, "messages": messages} | ({"tools": tools} if tools else {})
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
        raise PlayFailedError("gateway", f"was refused at the gateway: {error['message']}")
