"""A seat of an episode at the gateway: its requests become turns of its conversation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sluice.api.groups.episode import EpisodeLimits
from sluice.data.chat import PromptError
from sluice.engines.protocol import CallParser, EngineError, PromptRefusedError
from sluice.samples.sample import Messages, Sample
from sluice_rollout import metrics
from sluice_rollout.episode import Episode, EpisodeEndError
from sluice_rollout.gateway import calls, exchange, large, summaries
from sluice_rollout.gateway.conversation import Conversation, Turn
from sluice_rollout.gateway.errors import TOO_LONG, GatewayError, invalid, too_long, unavailable
from sluice_rollout.gateway.exchange import Answer, Raw, Request, ToolCall
from sluice_rollout.gateway.history import History, Place, Template, TextTooLongError
from sluice_rollout.gateway.shortening import Shortener
from sluice_rollout.gateway.summaries import Summaries
from sluice_rollout.tool_calls import ANSWER, CALLS, SEATS

_AROUND_A_REQUEST = 64
"""Tokens that a template writes around the request for a summary, and in place of results."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, the turn that it is of, and the seconds that were the engine's."""

    answer: Answer
    turn: Turn
    engine_seconds: float


@dataclass(slots=True)
class Seat:
    """A conversation of an episode's, and what may be asked for in it.

    longest: tokens before the first answer of a branch. parser: of tool calls. limits: of all that
    the episode's program may ask for here. name: of the seat; empty: the episode has no others.
    """

    episode: Episode
    template: Template
    parser: CallParser
    longest: int
    limits: EpisodeLimits
    name: str = ""
    conversation: Conversation = field(init=False)
    history: History = field(init=False)
    responses: dict[str, Messages] = field(default_factory=dict)
    """Histories, by the names of the responses that end them."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Arguments of tool calls as the model wrote them, by the calls' names."""
    full: bool = False
    """True where the last request was refused, because it did not fit."""
    shortener: Shortener = field(default_factory=Shortener)
    summaries: Summaries = field(default_factory=Summaries)
    _texts: dict[str, Turn] = field(default_factory=dict)
    """Turns of /v1/completions that began with a text, by all of it."""
    _calls: dict[Turn, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conversation = Conversation.of(self.episode.sample, self.name)
        self.history = History(self.conversation, self.template)

    async def reply(self, request: Request) -> Reply:
        """The model's turn. Raises GatewayError."""
        try:
            reply = await self._reply(request)
        except GatewayError as error:
            self.full = error.code == TOO_LONG
            raise
        self.full = False
        return reply

    async def _reply(self, request: Request) -> Reply:
        self._note_settings(request.settings)
        self._check_stop_ids(request)
        if self.limits.overflow == "summarise" and request.prompt is None:
            request, place, summarising = await self._summarised(request)
        else:
            (request, place), summarising = await self._shortened(request), 0.0
        turn, seconds = await self._turn(request, place)
        answer = self._told(turn, request)
        if request.raw:
            self.conversation.release(turn)
        return Reply(answer, turn, summarising + seconds)

    async def _turn(
        self, request: Request, place: Place, *, aside: bool = False
    ) -> tuple[Turn, float]:
        """The finished turn at this place, and the seconds that it took. aside: a summary."""
        if place.least:
            raise too_long(
                f"at least {place.least} tokens; the model's context has {self._context}"
            )
        turn = self.conversation.turn(place.parent, place.added)
        turn.aside, seconds = aside, 0.0
        try:
            if not turn.finish:
                seconds = await self._speak(turn, request)
                self._note_place(place)
        except BaseException:  # a client that has gone cancels its request
            turn.answered = False
            self.conversation.forget(turn)
            raise
        return turn, seconds

    async def _summarised(self, request: Request) -> tuple[Request, Place, float]:
        """The request as the model sees it, its place, and the seconds of a summary, where its
        history left no room without one. Raises GatewayError.
        """
        messages = self.summaries.shorten(request.messages, request.tools)
        shown = replace(request, messages=messages)
        place = await self._place(shown)
        if self._fits(place) or not self._may_summarise:
            return shown, place, 0.0
        asked = summaries.question(messages, self.limits.summary.prompt)
        if asked is None:
            return shown, place, 0.0
        seconds = await self._summarise(request, replace(shown, messages=asked, calls=False))
        shown = replace(request, messages=self.summaries.shorten(request.messages, request.tools))
        return shown, await self._place(shown), seconds

    async def _summarise(self, request: Request, asked: Request) -> float:
        """Let a summary take the place of a request's messages; the seconds it took."""
        most = self.limits.summary.tokens
        asked = replace(asked, max_tokens=most, stop=[])
        turn, seconds = await self._turn(asked, await self._place(asked), aside=True)
        cut = turn.finish == "length"
        metrics.GATEWAY_SUMMARIES.labels(outcome="cut" if cut else "ok").inc()
        if cut:
            raise too_long(
                f"the model's summary of the conversation did not end within {len(turn.tokens)} "
                f"tokens (rollout.limits.summary.tokens: {most})"
            )
        text = self.episode.generator.text(turn.tokens.tolist(), turn.stop)
        self.summaries.note(request.messages, request.tools, summaries.text_of(text))
        return seconds

    @property
    def _may_summarise(self) -> bool:
        limits = self.limits
        return limits.overflow == "summarise" and len(self.summaries.seen) < limits.summary.most

    @property
    def _reserve(self) -> int:
        """Tokens that stay free behind a turn, to ask for a summary and have it."""
        if not self._may_summarise:
            return 0
        asked = self.template.encode(self.limits.summary.prompt)
        return len(asked) + _AROUND_A_REQUEST + self.limits.summary.tokens

    async def _shortened(self, request: Request) -> tuple[Request, Place]:
        """The request as the model sees it, and its place. Raises GatewayError."""
        while True:
            shown = replace(request, messages=self.shortener.shorten(request.messages))
            place = await self._place(shown)
            if self.limits.overflow != "drop_tool_results" or self._fits(place):
                return shown, place
            dropped = self.shortener.drop(request.messages)
            if not dropped:
                return shown, place
            metrics.GATEWAY_DROPPED.inc(dropped)

    def _fits(self, place: Place) -> bool:
        """True where a turn has room at this place."""
        if place.least:
            return False
        turn = Turn(place.parent, np.array(place.added, np.int32))
        most, wanted = self.episode.sampling["max_new_tokens"], self.limits.turn_tokens or 1
        if wanted >= most:  # no turn but the first could have that
            wanted = 1
        left = self._left(turn) - self._reserve
        return turn.prompt_length <= self.longest and left >= wanted

    async def _place(self, request: Request) -> Place:
        """The place where the request goes on. Raises GatewayError."""
        try:
            return await large.run(request.size, self._placed, request)
        except TextTooLongError as error:
            return Place(None, [], least=error.tokens)
        except PromptError as error:
            raise invalid(str(error)) from error

    def _placed(self, request: Request) -> Place:
        """As `_place`. It may run in a thread: what it reads of the seat is only ever added to."""
        if request.prompt is None:
            return self.history.place(request.messages, request.tools)
        if isinstance(request.prompt, list):
            if max(request.prompt) >= len(self.template.tokenizer):
                raise invalid("prompt: a token id is not in the model's vocabulary", "prompt")
            return self.history.fresh(request.prompt)
        begins = [text for text in [*self._texts] if request.prompt.startswith(text)]
        if begins:
            text = max(begins, key=len)
            return Place(self._texts[text], self.template.encode(request.prompt[len(text) :]))
        opening = request.raw is None
        return self.history.fresh(self.template.encode(request.prompt, opening=opening))

    def _note_place(self, place: Place) -> None:
        kind = "rerendered" if place.rerendered else "continued" if place.parent else "new"
        metrics.GATEWAY_TURNS.labels(history=kind).inc()
        metrics.GATEWAY_RERENDERED.inc(place.rerendered)

    @property
    def _context(self) -> int:
        """Tokens of the model's context."""
        return self.longest + int(self.episode.sampling["max_new_tokens"])

    def _check_stop_ids(self, request: Request) -> None:
        ids, size = request.raw.stop_ids if request.raw else [], len(self.template.tokenizer)
        if max(ids, default=0) >= size:
            raise invalid(
                f"stop_token_ids: {max(ids)} is not in the model's vocabulary of {size} tokens",
                "stop_token_ids",
            )

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
        room = self._left(turn) - (0 if turn.aside else self._reserve)
        if room <= 0:
            most = self.episode.sampling["max_new_tokens"]
            raise too_long(f"the response has its {most} tokens (sampling.maxResponseTokens)")
        return room

    def _check_limits(self, turn: Turn) -> None:
        """Raises GatewayError where the turn would be one too many, or its branch."""
        turns, branches = self.conversation.counts_with(turn)
        for name, count in (("turns", turns), ("branches", branches)):
            if count > (most := getattr(self.limits, name)):
                raise too_long(f"the episode has its {most} {name} (rollout.limits.{name})")

    def _left(self, turn: Turn) -> int:
        """Tokens that are left of the response, where the turn begins."""
        most = int(self.episode.sampling["max_new_tokens"])
        return most - (len(turn.context) - turn.prompt_length)

    async def _speak(self, turn: Turn, request: Request) -> float:
        """Have the engine finish the turn, from the tokens that it has; the seconds it took."""
        if self.episode.ended:  # not raised again: its traceback would keep this turn
            raise _refusal(self.episode.ended)
        if request.raw and (self._left(turn) <= 0 or request.max_tokens == 0):
            turn.finish = "length"
            return 0.0
        self._check_limits(turn)
        room = self._room(turn)
        of_turns = room if turn.aside else self.limits.turn_tokens or room
        left = min(room, request.max_tokens or room, of_turns) - len(turn.tokens)
        sample = Sample(index=self.episode.sample.index)
        sample.append_prompt(turn.context.tolist())
        sample.append(turn.tokens.tolist(), turn.log_probs.tolist(), turn.spans)
        record: dict[str, Any] = {"length": len(turn.tokens)}
        start = time.monotonic()
        try:
            await self.episode.speak(record, self._sampling(request), left, sample)
        except (EngineError, EpisodeEndError) as error:
            raise _refusal(error) from error
        finally:
            turn.tokens = sample.tokens[sample.prompt_length :]
            turn.log_probs, turn.spans = sample.rollout_log_probs, sample.weight_versions
            turn.experts = sample.routed_experts
        turn.finish, turn.stop = record["finish"], record.get("stop")
        return time.monotonic() - start

    def _sampling(self, request: Request) -> dict[str, Any]:
        """The job's, and the client's stops beside its own."""
        sampling = dict(self.episode.sampling)
        stop_ids = request.raw.stop_ids if request.raw else []
        for name, more in (("stop", request.stop), ("stop_token_ids", stop_ids)):
            if more:
                sampling[name] = [*dict.fromkeys([*(sampling.get(name) or []), *more])]
        return sampling

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
        if request.raw:
            text = self._raw_text(turn, tokens, request.raw)
        sampled = list(zip(tokens, turn.log_probs.tolist(), strict=True))
        answer = Answer(
            text, tool_calls, finish, len(turn.context), len(tokens), turn.stop, sampled
        )
        self._remember(turn, request, answer)
        return answer

    def _raw_text(self, turn: Turn, tokens: list[int], raw: Raw) -> str:
        """The text of a turn as SGLang gives it."""
        kept = tokens if raw.keep_stop else self._without_end(turn, tokens)
        tokenizer = self.template.tokenizer
        text: str = tokenizer.decode(kept, skip_special_tokens=raw.skip_special_tokens)
        return text if raw.keep_stop else text.removesuffix(turn.stop or "")

    def _without_end(self, turn: Turn, tokens: list[int]) -> list[int]:
        """Without the token that ends a turn; those that mark tool calls may be special too."""
        ended = turn.finish == "stop" and not turn.stop and tokens
        return tokens[:-1] if ended and tokens[-1] in self.template.special else tokens

    def _remember(self, turn: Turn, request: Request, answer: Answer) -> None:
        tokens = turn.tokens.tolist()
        self._calls[turn] = len(answer.calls)
        self.arguments |= {call.id: call.arguments for call in answer.calls}
        told = {CALLS: sum(self._calls.values()), ANSWER: answer.text}
        if self.name:
            self.episode.metadata.setdefault(SEATS, {})[self.name] = told
        else:
            self.episode.metadata.update(told)
        if request.prompt is None:
            raw = self.episode.generator.decode(tokens)
            self.history.note([*request.messages, answer.message], request.tools, turn, raw)
        elif isinstance(request.prompt, str) and tokens and (request.raw or not turn.stop):
            self._texts[request.prompt + answer.text] = turn


def _refusal(ended: BaseException) -> GatewayError:
    """The answer to a request for which the engine, or the episode, has no turn."""
    return (invalid if isinstance(ended, PromptRefusedError) else unavailable)(str(ended))
