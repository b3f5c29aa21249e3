"""One episode's seat at the gateway: its requests become turns of its conversation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from sluice.data.chat import PromptError
from sluice.engines.base import CallParser, EngineError, PromptRefusedError
from sluice.sample import Messages, Sample
from sluice_rollout import metrics
from sluice_rollout.episode import Episode, EpisodeEndError
from sluice_rollout.gateway import calls, exchange
from sluice_rollout.gateway.conversation import Conversation, Turn
from sluice_rollout.gateway.errors import invalid, too_long, unavailable
from sluice_rollout.gateway.exchange import Answer, Request, ToolCall
from sluice_rollout.gateway.history import History, Place, Template
from sluice_rollout.tools import ANSWER, CALLS


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, the turn that it is of, and the seconds that were the engine's."""

    answer: Answer
    turn: Turn
    engine_seconds: float


@dataclass(slots=True)
class Seat:
    """An episode's conversation, and what it may ask for.

    longest: tokens before the first answer of a branch. parser: of tool calls.
    """

    episode: Episode
    template: Template
    parser: CallParser
    longest: int
    conversation: Conversation = field(init=False)
    history: History = field(init=False)
    responses: dict[str, Messages] = field(default_factory=dict)
    """Histories, by the names of the responses that end them."""
    _texts: dict[str, Turn] = field(default_factory=dict)
    """Turns of /v1/completions that began with a text, by all of it."""
    _calls: dict[Turn, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conversation = Conversation.of(self.episode.sample)
        self.history = History(self.conversation, self.template)

    async def reply(self, request: Request) -> Reply:
        """The model's turn. Raises GatewayError."""
        self._note_settings(request.settings)
        place = self._place(request)
        turn = self.conversation.turn(place.parent, place.added)
        seconds = 0.0
        try:
            if not turn.finish:
                seconds = await self._speak(turn, request)
                self._note_place(place)
        except BaseException:  # a client that has gone cancels its request
            turn.answered = False
            raise
        return Reply(self._told(turn, request), turn, seconds)

    def close(self, *, interrupted: bool) -> None:
        """Put what is trained into the episode's sample. interrupted: all that another play can go
        on from.
        """
        branches = self.conversation.branches(waiting=interrupted)
        if not branches:
            return
        branches[0].write(self.episode.sample)
        metrics.GATEWAY_BRANCHES.labels(outcome="trained").inc()
        metrics.GATEWAY_BRANCHES.labels(outcome="left_out").inc(len(branches) - 1)

    def _place(self, request: Request) -> Place:
        """The place where the request goes on. Raises GatewayError."""
        try:
            return self._found(request)
        except PromptError as error:
            raise invalid(str(error)) from error

    def _found(self, request: Request) -> Place:
        if request.prompt is None:
            return self.history.place(request.messages, request.tools)
        if isinstance(request.prompt, list):
            if max(request.prompt) >= len(self.template.tokenizer):
                raise invalid("prompt: a token id is not in the model's vocabulary", "prompt")
            return self.history.fresh(request.prompt)
        begins = [text for text in self._texts if request.prompt.startswith(text)]
        if begins:
            text = max(begins, key=len)
            return Place(self._texts[text], self.template.encode(request.prompt[len(text) :]))
        return self.history.fresh(self.template.encode(request.prompt, opening=True))

    def _note_place(self, place: Place) -> None:
        kind = "rerendered" if place.rerendered else "continued" if place.parent else "new"
        metrics.GATEWAY_TURNS.labels(history=kind).inc()
        metrics.GATEWAY_RERENDERED.inc(place.rerendered)

    def _note_settings(self, settings: dict[str, Any]) -> None:
        for name in exchange.overridden(settings, self.episode.sampling):
            metrics.GATEWAY_OVERRIDDEN.labels(setting=name).inc()

    def _room(self, turn: Turn) -> int:
        """Tokens that the turn may have. Raises GatewayError."""
        if turn.prompt_length > self.longest:
            raise too_long(
                f"{turn.prompt_length} tokens; at most {self.longest} fit before a response (the "
                "model's context less sampling.maxResponseTokens)"
            )
        most = int(self.episode.sampling["max_new_tokens"])
        room = most - (len(turn.context) - turn.prompt_length)
        if room <= 0:
            raise too_long(f"the response has its {most} tokens (sampling.maxResponseTokens)")
        return room

    async def _speak(self, turn: Turn, request: Request) -> float:
        """Have the engine finish the turn, from the tokens that it has; the seconds it took."""
        room = self._room(turn)
        left = min(room, request.max_tokens or room) - len(turn.tokens)
        sample = Sample(index=self.episode.sample.index)
        sample.append_prompt(turn.context.tolist())
        sample.append(turn.tokens.tolist(), turn.log_probs.tolist(), turn.spans)
        record: dict[str, Any] = {"length": len(turn.tokens)}
        start = time.monotonic()
        try:
            await self.episode.speak(record, self._sampling(request), left, sample)
        except PromptRefusedError as error:
            raise invalid(str(error)) from error
        except (EngineError, EpisodeEndError) as error:
            raise unavailable(str(error)) from error
        finally:
            turn.tokens = sample.tokens[sample.prompt_length :]
            turn.log_probs, turn.spans = sample.rollout_log_probs, sample.weight_versions
        turn.finish, turn.stop = record["finish"], record.get("stop")
        return time.monotonic() - start

    def _sampling(self, request: Request) -> dict[str, Any]:
        """The job's, and the client's stops beside its own."""
        sampling = self.episode.sampling
        if not request.stop:
            return sampling
        return sampling | {"stop": [*(sampling.get("stop") or []), *request.stop]}

    def _told(self, turn: Turn, request: Request) -> Answer:
        """A finished turn as its client sees it; remembered, to be known when it comes back."""
        tokens = turn.tokens.tolist()
        text = self.episode.generator.text(tokens, turn.stop)
        tool_calls: list[ToolCall] = []
        if request.tools and request.calls:
            whole = self.template.tokenizer.decode(self._without_end(turn, tokens))
            rest, tool_calls = calls.parse(whole, request.tools, self.parser)
            text = rest.strip() if tool_calls else text
        finish = "tool_calls" if tool_calls and turn.finish == "stop" else turn.finish
        answer = Answer(text, tool_calls, finish, len(turn.context), len(tokens))
        self._remember(turn, request, answer)
        return answer

    def _without_end(self, turn: Turn, tokens: list[int]) -> list[int]:
        """Without the token that ends a turn; those that mark tool calls may be special too."""
        ended = turn.finish == "stop" and not turn.stop and tokens
        return tokens[:-1] if ended and tokens[-1] in self.template.special else tokens

    def _remember(self, turn: Turn, request: Request, answer: Answer) -> None:
        metadata = self.episode.metadata
        self._calls[turn] = len(answer.calls)
        metadata[CALLS] = sum(self._calls.values())
        metadata[ANSWER] = answer.text
        if request.prompt is None:
            raw = self.episode.generator.decode(turn.tokens.tolist())
            self.history.note([*request.messages, answer.message], request.tools, turn, raw)
        elif isinstance(request.prompt, str) and not turn.stop:
            self._texts[request.prompt + answer.text] = turn
