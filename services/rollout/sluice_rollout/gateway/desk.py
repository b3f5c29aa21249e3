"""The gateway as the worker has it: episodes get an address and a key while they play."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sluice.api import RLJobSpec
from sluice.engines.base import CallParser
from sluice_rollout.episode import Episode, Gateway
from sluice_rollout.gateway.calls import parser_of
from sluice_rollout.gateway.history import Template
from sluice_rollout.gateway.seat import Seat
from sluice_rollout.gateway.server import Server, Visit
from sluice_rollout.prompts import PromptEncoder


@dataclass(slots=True)
class Desk:
    """Seats for the episodes of a job. Used inside of `async with`."""

    spec: RLJobSpec
    encoder: PromptEncoder
    server: Server
    parser: CallParser
    templates: dict[str, Template] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RLJobSpec, encoder: PromptEncoder) -> Desk:
        """Raises ConfigurationError."""
        return cls(spec, encoder, Server(Path(spec.model.path).name), parser_of(spec))

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def admit(self, episode: Episode) -> Gateway:
        """Open the gateway to an episode, for the task that calls this."""
        prompt = episode.prompt
        seat = Seat(
            episode,
            self._template(prompt.dataset),
            self.parser,
            self.encoder.context.tokens - int(episode.sampling["max_new_tokens"]),
        )
        visit = Visit(seat, contextvars.copy_context())
        key = self.server.keys.issue(
            prompt.group_id, episode.sample.index, prompt.lease_attempt, visit
        )

        def close(interrupted: bool) -> None:
            self.server.keys.expire(key)
            visit.end()
            seat.close(interrupted=interrupted)

        return Gateway(self.server.base_url, key, close)

    def _template(self, dataset: str) -> Template:
        if dataset not in self.templates:
            arguments = self.encoder.template_arguments(dataset)
            self.templates[dataset] = Template(self.encoder.tokenizer, arguments)
        return self.templates[dataset]
