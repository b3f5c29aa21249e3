"""The gateway as the worker has it: episodes get an address and a key while they play."""

from __future__ import annotations

import asyncio
import contextvars
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sluice.api import RLJobSpec
from sluice.engines.protocol import CallParser
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.episode_protocol import PATH
from sluice_rollout.environments.pods import EpisodePods
from sluice_rollout.episode import Episode
from sluice_rollout.gateway.agent_session import Seat
from sluice_rollout.gateway.agents import Table
from sluice_rollout.gateway.calls import hermes, parser_of
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.gateway.history import Template
from sluice_rollout.gateway.server import Server, Visit
from sluice_rollout.prompts import PromptEncoder


@dataclass(frozen=True, slots=True)
class Place:
    """An address that other pods reach, and those that may join there."""

    host: str
    port: int
    pods: EpisodePods


@dataclass(slots=True)
class Desk:
    """Seats for the episodes of a job. Used inside of `async with`."""

    spec: RLJobSpec
    encoder: PromptEncoder
    server: Server
    parser: CallParser | ConfigurationError = hermes
    """Of tool calls; or why there is none, for the programs that would need it."""
    templates: dict[str, Template] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RLJobSpec, encoder: PromptEncoder, place: Place | None = None) -> Desk:
        """place: where pods of episodes reach it; None: nobody else does."""
        model = Path(spec.model.path).name
        if place is None:
            return cls(spec, encoder, Server(model, models=spec.rollout.models))
        join = (PATH, place.pods.join)
        server = Server(model, place.host, place.port, join, spec.rollout.models)
        return cls(spec, encoder, server)

    async def __aenter__(self) -> Self:
        if _has_players(self.spec):  # nobody else is let in
            self.parser = await asyncio.to_thread(_parser, self.spec)  # may import an engine
            await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def admit(self, episode: Episode) -> Gateway:
        """Open the gateway to an episode, for the task that calls this.

        Raises ConfigurationError where the parser that the job names is not to be had.
        """
        prompt = episode.prompt
        table = Table(episode, {n: self._seat(episode, n) for n in episode.seats or ("",)})
        visits = {
            name: Visit(seat, contextvars.copy_context()) for name, seat in table.seats.items()
        }
        key = self.server.keys.issue(
            prompt.group_id, episode.sample.index, prompt.lease_attempt, visits
        )

        def close(interrupted: bool) -> None:
            self.server.keys.expire(key)
            for visit in visits.values():
                visit.end()
            table.close(interrupted=interrupted)

        return Gateway(
            self.server.base_url, key, close, table.keep, lambda: table.full, table.reward_turn
        )

    def _seat(self, episode: Episode, name: str) -> Seat:
        if isinstance(self.parser, ConfigurationError):
            raise self.parser
        return Seat(
            episode,
            self._template(episode.prompt.dataset),
            self.parser,
            self.encoder.context.tokens - int(episode.sampling["max_new_tokens"]),
            self.spec.rollout.limits,
            name,
        )

    def _template(self, dataset: str) -> Template:
        if dataset not in self.templates:
            arguments = self.encoder.template_arguments(dataset)
            self.templates[dataset] = Template(
                self.encoder.tokenizer, arguments, self.encoder.context.tokens
            )
        return self.templates[dataset]


def _has_players(spec: RLJobSpec) -> bool:
    held_out = spec.evaluation.datasets if spec.evaluation else []
    sources = [*spec.data.prompts, *held_out]
    rollout = spec.rollout
    return any([rollout.function, rollout.environment, *(source.function for source in sources)])


def _parser(spec: RLJobSpec) -> CallParser | ConfigurationError:
    try:
        return parser_of(spec)
    except ConfigurationError as error:
        return error
