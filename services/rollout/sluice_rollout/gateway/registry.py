"""Registers the episodes of a job at the gateway: each gets an address and a key while it plays.

A request walks through these parts: `Server` looks up its key and finds the episode's
`AuthenticatedSession`s, one for each agent. The session runs `AgentSession.reply` in the context of
the episode's group. That finds the turn of its `Conversation` that the request continues, has the
engine generate the next one, and remembers the answer. When the episode ends, `EpisodeAgents`
writes the conversations into its sample.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sluice.api import RLJobSpec
from sluice.engines.protocol import CallParser
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.episode_protocol import PATH
from sluice.samples.sample import Sample
from sluice.samples.turns import BRANCH_TURNS
from sluice.wire.image_client import ImageClient
from sluice_rollout import metrics
from sluice_rollout.episode import Episode
from sluice_rollout.gateway.agent_session import AgentSession, AuthenticatedSession
from sluice_rollout.gateway.conversation import write_branches
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.gateway.history import Template
from sluice_rollout.gateway.images import ImageGate, SessionImages
from sluice_rollout.gateway.sample_claims import ClaimError, SampleClaim, claimed_sample
from sluice_rollout.gateway.server import Handler, Server
from sluice_rollout.gateway.tool_call_parser import hermes, parser_of
from sluice_rollout.generate import REQUESTS
from sluice_rollout.prompts import PromptEncoder


@dataclass(frozen=True, slots=True)
class PodAddress:
    """Address at which episode pods reach the gateway, and the handler that lets them join."""

    host: str
    port: int
    join: Handler


@dataclass(slots=True)
class EpisodeAgents:
    """The agents of one episode, by seat. Without `rollout.seats`, the only seat is ""."""

    episode: Episode
    agents: Mapping[str, AgentSession]
    _claimed: Sample | None = None

    @property
    def is_full(self) -> bool:
        """True if an agent's last request was refused because it did not fit the context."""
        return any(agent.is_full for agent in self.agents.values())

    def close(self, *, interrupted: bool) -> None:
        """Write the agents' conversations into the episode's sample.

        If the episode was `interrupted`, turns that no client has received are kept as well, so
        that the next attempt can continue from them.
        """
        conversations = {seat: agent.conversation for seat, agent in self.agents.items()}
        branches = write_branches(conversations, self.episode.sample, with_unanswered=interrupted)
        if self._claimed and not interrupted:
            self.episode.sample.metadata.pop(BRANCH_TURNS, None)
            self.episode.sample.take(self._claimed)
            branches = min(branches, 1)
        metrics.GATEWAY_BRANCHES.inc(branches)

    def claim_sample(self, tokens: Sequence[int], mask: Sequence[int]) -> None:
        """Train the tokens that the program claims, once the episode ends. Raises ClaimError."""
        if "" not in self.agents:
            raise ClaimError("cannot claim a sample: the job has rollout.seats")
        claim = SampleClaim(tokens, mask)
        sample = Sample(index=self.episode.sample.index)
        self._claimed = claimed_sample(claim, self.agents[""].conversation.turns, sample)

    def reward_turn(self, value: float, seat: str, turn: int) -> None:
        """Add a value to the reward of a turn.

        `turn` indexes the answered turns of the seat, and may be negative. Raises IndexError.
        """
        self.agents[seat].conversation.answered_turns()[turn].reward += value


@dataclass(slots=True)
class EpisodeRegistry:
    """Opens the gateway to episodes of a job. An asynchronous context manager."""

    spec: RLJobSpec
    encoder: PromptEncoder
    server: Server
    # Parser of tool calls. An error is raised only if a program asks for the gateway: a generate
    # function may not need a parser.
    parser: CallParser | ConfigurationError = hermes
    # Reads and stores the images of agents; None if the job's model gets none.
    image_gate: ImageGate | None = None
    templates: dict[str, Template] = field(default_factory=dict)

    @classmethod
    def for_job(
        cls,
        spec: RLJobSpec,
        encoder: PromptEncoder,
        pod_address: PodAddress | None = None,
        image_client: ImageClient | None = None,
    ) -> EpisodeRegistry:
        """Make the registry of a job, whose server does not listen yet.

        Parameters
        ----------
        spec
            The job's specification.
        encoder
            Encodes prompts with the model's chat template.
        pod_address
            Address for episode pods. None: only programs on this machine reach the gateway.
        image_client
            Stores the images of agents; None if the job's model gets none.

        Returns
        -------
        The registry, to be used in an `async with`.

        """
        model = Path(spec.model.path).name
        if pod_address is None:
            server = Server(model, models=spec.rollout.models)
        else:
            join = (PATH, pod_address.join)
            server = Server(model, pod_address.host, pod_address.port, join, spec.rollout.models)
        gate = ImageGate.for_job(spec, encoder, image_client)
        return cls(spec, encoder, server, image_gate=gate)

    async def __aenter__(self) -> Self:
        if _needs_gateway(self.spec):
            self.parser = await asyncio.to_thread(_parser, self.spec)  # may import an engine
            await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def open_gateway(self, episode: Episode) -> Gateway:
        """Open the gateway to an episode.

        Requests of the episode run in the context of the calling task.

        Raises
        ------
        ConfigurationError
            The tool call parser that the job names is not installed.

        """
        prompt = episode.prompt
        agents = EpisodeAgents(
            episode, {seat: self._agent_session(episode, seat) for seat in episode.seats or ("",)}
        )
        sessions = {
            seat: AuthenticatedSession(agent, contextvars.copy_context())
            for seat, agent in agents.agents.items()
        }
        key = self.server.keys.issue(
            prompt.group_id, episode.sample.index, prompt.lease_attempt, sessions
        )

        def close(interrupted: bool) -> None:
            self.server.keys.expire(key)
            for session in sessions.values():
                session.end()
            agents.close(interrupted=interrupted)

        return Gateway(
            self.server.base_url,
            key,
            close,
            agents.claim_sample,
            lambda: agents.is_full,
            agents.reward_turn,
        )

    def _agent_session(self, episode: Episode, seat: str) -> AgentSession:
        if isinstance(self.parser, ConfigurationError):
            raise self.parser
        return AgentSession(
            episode,
            self._template(episode.prompt.dataset),
            self.parser,
            self.encoder.context.tokens - int(episode.sampling["max_new_tokens"]),
            self.spec.rollout.limits,
            SessionImages(
                self.image_gate,
                REQUESTS.get(),
                episode.prompt.lease_id,
                self.encoder.context.tokens,
            ),
            seat,
        )

    def _template(self, dataset: str) -> Template:
        if dataset not in self.templates:
            arguments = self.encoder.template_arguments(dataset)
            processor = self.encoder.image_processor
            self.templates[dataset] = Template(
                self.encoder.tokenizer,
                arguments,
                self.encoder.context.tokens,
                processor.placeholder if processor else None,
            )
        return self.templates[dataset]


def _needs_gateway(spec: RLJobSpec) -> bool:
    """True if the job has generate functions or an environment that may ask for the gateway."""
    held_out = spec.evaluation.datasets if spec.evaluation else []
    sources = [*spec.data.prompts, *held_out]
    rollout = spec.rollout
    return any([rollout.function, rollout.environment, *(source.function for source in sources)])


def _parser(spec: RLJobSpec) -> CallParser | ConfigurationError:
    try:
        return parser_of(spec)
    except ConfigurationError as error:
        return error
