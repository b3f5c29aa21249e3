"""An agent's session at the gateway: requests become turns of the agent's conversation."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sluice.api.groups.episode import EpisodeLimits
from sluice.data.chat import PromptError
from sluice.engines.protocol import CallParser, EngineError, PromptRefusedError
from sluice.images.image import Image
from sluice.samples.sample import Messages, Sample
from sluice.telemetry import tracing
from sluice.wire import rpc
from sluice_rollout import metrics
from sluice_rollout.episode import Episode, EpisodeEndError, EpisodeTimeError, PlayFailedError
from sluice_rollout.gateway import compaction, large_requests, tool_call_parser
from sluice_rollout.gateway.compaction import Summaries, ToolResultDropper
from sluice_rollout.gateway.conversation import Conversation, Turn
from sluice_rollout.gateway.history import Continuation, History, Template, TextTooLongError
from sluice_rollout.gateway.images import SessionImages
from sluice_rollout.gateway.interfaces import exchange
from sluice_rollout.gateway.interfaces.errors import (
    TOO_LONG,
    GatewayError,
    invalid,
    too_long,
    unavailable,
)
from sluice_rollout.gateway.interfaces.exchange import (
    Answer,
    AnswerToolCall,
    RawFormat,
    TurnRequest,
)
from sluice_rollout.gateway.turn_stream import IncrementalDecoder, TurnStream
from sluice_rollout.tool_calls import ANSWER, CALLS, SEATS

# Tokens that a chat template writes around the request for a summary and around dropped results.
_TEMPLATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, its turn, and the seconds that the engine took."""

    answer: Answer
    turn: Turn
    engine_seconds: float


@dataclass(slots=True)
class AgentSession:
    """The conversation of one agent with the model, and the limits on what it may ask for.

    Parameters
    ----------
    episode
        The episode that the agent plays.
    template
        The model's chat template and tokenizer.
    parser
        Reads tool calls in the model's text.
    max_prompt_tokens
        Tokens that may come before the first answer of a branch.
    limits
        Limits on turns, branches and their length (`rollout.limits`).
    images
        The images of the agent's conversation.
    seat
        The agent's name in `rollout.seats`; empty if the job has no seats.

    """

    episode: Episode
    template: Template
    parser: CallParser
    max_prompt_tokens: int
    limits: EpisodeLimits
    images: SessionImages
    seat: str = ""
    conversation: Conversation = field(init=False)
    history: History = field(init=False)
    # Histories by the id of the response that ends them (/v1/responses).
    response_histories: dict[str, Messages] = field(default_factory=dict)
    # Arguments of tool calls as the model wrote them, by the id of the call.
    tool_arguments: dict[str, str] = field(default_factory=dict)
    # True if the last request was refused because it did not fit the context.
    is_full: bool = False
    tool_results: ToolResultDropper = field(default_factory=ToolResultDropper)
    summaries: Summaries = field(default_factory=Summaries)
    # Turns of /v1/completions with a text for a prompt, by prompt and answer.
    _completion_turns: dict[str, Turn] = field(default_factory=dict)
    _call_counts: dict[Turn, int] = field(default_factory=dict)
    # When turns with calls were answered, and the tools that they call; only while tracing.
    _calling: dict[Turn | None, tuple[float, list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conversation = Conversation.from_sample(self.episode.sample, self.seat)
        self.history = History(self.conversation, self.template)

    def stream(self, request: TurnRequest) -> TurnStream:
        """Return a stream of the text of a turn, for `reply`."""
        has_calls = bool(request.tools and request.calls)
        return TurnStream(
            IncrementalDecoder(self.episode.generator.decode),
            self._sampling(request).get("stop") or (),
            self.parser.start if has_calls else None,
            self.template.special if has_calls else frozenset(),
        )

    async def reply(self, request: TurnRequest, stream: TurnStream | None = None) -> Reply:
        """Generate the model's turn. `stream` gets its text meanwhile. Raises GatewayError."""
        try:
            with tracing.span("turn", sample=self.episode.sample.index, seat=self.seat):
                reply = await self._reply(request, stream)
                self._trace(reply)
        except GatewayError as error:
            self.is_full = error.code == TOO_LONG
            raise
        self.is_full = False
        return reply

    def _trace(self, reply: Reply) -> None:
        """Describe a turn in its span, and note which tools the program calls next."""
        if not tracing.enabled():
            return
        answer, turn = reply.answer, reply.turn
        tracing.set_attributes(
            turn=self.conversation.turns.index(turn),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            tokens=answer.completion_tokens,
            finish=answer.finish,
        )
        if answer.calls:
            self._calling[turn] = tracing.now(), [call.name for call in answer.calls]

    def _trace_tools(self, parent: Turn | None) -> None:
        """Record the time in which the program ran the tools that a turn has called."""
        if parent in self._calling:
            began, tools = self._calling.pop(parent)
            tracing.record_child("tools", began, tracing.now(), tools=tools)

    async def _reply(self, request: TurnRequest, stream: TurnStream | None) -> Reply:
        self._count_overridden(request.settings)
        self._check_stop_ids(request)
        if self.limits.overflow == "summarise" and request.prompt is None:
            request, continuation, summarising = await self._with_summary(request)
        else:
            (request, continuation), summarising = await self._without_old_results(request), 0.0
        self._trace_tools(continuation.parent)
        turn, seconds = await self._finished_turn(request, continuation, stream)
        answer = self._answer(turn, request, stream)
        if request.raw:
            self.conversation.free_context(turn)
        return Reply(answer, turn, summarising + seconds)

    async def _finished_turn(
        self,
        request: TurnRequest,
        continuation: Continuation,
        stream: TurnStream | None = None,
        *,
        is_summary: bool = False,
    ) -> tuple[Turn, float]:
        """Return the finished turn at a continuation, and the seconds that the engine took."""
        if least := continuation.least_tokens:
            raise too_long(
                f"at least {least} tokens; the model's context has {self._context_tokens}"
            )
        turn = self.conversation.turn_at(
            continuation.parent,
            continuation.added,
            continuation.images,
            self.images.tokens_added(continuation.images),
        )
        turn.is_summary, seconds = is_summary, 0.0
        try:
            if not turn.finish:
                seconds = await self._generate(turn, request, stream)
                self._count_continuation(continuation)
        except BaseException:  # a client that disconnects cancels its request
            turn.answered = False
            self.conversation.discard_if_empty(turn)
            raise
        return turn, seconds

    async def _with_summary(self, request: TurnRequest) -> tuple[TurnRequest, Continuation, float]:
        """Summarise the history if it leaves no room for a turn.

        Returns the request as the model sees it, its continuation, and the seconds that the engine
        took for a summary. Raises GatewayError.
        """
        messages = self.summaries.shorten(request.messages, request.tools)
        visible = replace(request, messages=messages)
        continuation = await self._continuation(visible)
        if self._fits(continuation) or not self._may_summarise:
            return visible, continuation, 0.0
        question = compaction.summary_request(messages, self.limits.summary.prompt)
        if question is None:
            return visible, continuation, 0.0
        seconds = await self._summarise(request, replace(visible, messages=question, calls=False))
        visible = replace(request, messages=self.summaries.shorten(request.messages, request.tools))
        return visible, await self._continuation(visible), seconds

    async def _summarise(self, request: TurnRequest, question: TurnRequest) -> float:
        """Replace a request's messages by the model's summary. Returns the engine's seconds."""
        max_tokens = self.limits.summary.tokens
        question = replace(question, max_tokens=max_tokens, stop=[])
        turn, seconds = await self._finished_turn(
            question, await self._continuation(question), is_summary=True
        )
        cut = turn.finish == "length"
        metrics.GATEWAY_SUMMARIES.labels(outcome="cut" if cut else "ok").inc()
        if cut:
            raise too_long(
                f"the model's summary of the conversation did not end within {len(turn.tokens)} "
                f"tokens (rollout.limits.summary.tokens: {max_tokens})"
            )
        text = self.episode.generator.text(turn.tokens.tolist(), turn.stop)
        self.summaries.replace(request.messages, request.tools, compaction.summary_text(text))
        return seconds

    @property
    def _may_summarise(self) -> bool:
        limits = self.limits
        return (
            limits.overflow == "summarise"
            and len(self.summaries.replacements) < limits.summary.most
        )

    @property
    def _summary_reserve(self) -> int:
        """Tokens that must stay free after a turn, to ask for a summary and generate it."""
        if not self._may_summarise:
            return 0
        question = self.template.encode(self.limits.summary.prompt)
        return len(question) + _TEMPLATE_TOKENS + self.limits.summary.tokens

    async def _without_old_results(self, request: TurnRequest) -> tuple[TurnRequest, Continuation]:
        """Drop old results of tools until the request fits, if the limits say so.

        Returns the request as the model sees it, and its continuation. Raises GatewayError.
        """
        while True:
            visible = replace(request, messages=self.tool_results.shorten(request.messages))
            continuation = await self._continuation(visible)
            if self.limits.overflow != "drop_tool_results" or self._fits(continuation):
                return visible, continuation
            dropped = self.tool_results.drop(request.messages)
            if not dropped:
                return visible, continuation
            metrics.GATEWAY_DROPPED.inc(dropped)

    def _fits(self, continuation: Continuation) -> bool:
        """True if a whole turn has room at a continuation."""
        if continuation.least_tokens:
            return False
        turn = Turn(
            continuation.parent,
            np.array(continuation.added, np.int32),
            image_tokens=self.images.tokens_added(continuation.images),
        )
        needed = self.limits.turn_tokens or 1
        if needed >= self.episode.sampling["max_new_tokens"]:
            needed = 1  # only a first turn can have that many tokens
        left = self._tokens_left(turn) - self._summary_reserve
        return turn.prompt_length <= self.max_prompt_tokens and left >= needed

    async def _continuation(self, request: TurnRequest) -> Continuation:
        """Find what a request continues. Raises GatewayError."""
        try:
            return await large_requests.run(request.size, self._find_continuation, request)
        except TextTooLongError as error:
            return Continuation(None, [], least_tokens=error.tokens)
        except PromptError as error:
            raise invalid(str(error)) from error

    def _find_continuation(self, request: TurnRequest) -> Continuation:
        # May run in a thread: other code only ever adds to the fields that this reads.
        if request.prompt is None:
            return self.history.continue_messages(request.messages, request.tools)
        if isinstance(request.prompt, list):
            if max(request.prompt) >= len(self.template.tokenizer):
                raise invalid("prompt: a token id is not in the model's vocabulary", "prompt")
            return self.history.continue_tokens(request.prompt)
        texts = [text for text in [*self._completion_turns] if request.prompt.startswith(text)]
        if texts:
            text = max(texts, key=len)
            return self.history.continue_text(
                self._completion_turns[text], request.prompt[len(text) :]
            )
        opening = request.raw is None
        return self.history.continue_tokens(self.template.encode(request.prompt, opening=opening))

    def _count_continuation(self, continuation: Continuation) -> None:
        kind = "continued" if continuation.parent else "new"
        if continuation.rerendered:
            kind = "rerendered"
        metrics.GATEWAY_TURNS.labels(history=kind).inc()
        metrics.GATEWAY_RERENDERED.inc(continuation.rerendered)

    @property
    def _context_tokens(self) -> int:
        return self.max_prompt_tokens + int(self.episode.sampling["max_new_tokens"])

    def _check_stop_ids(self, request: TurnRequest) -> None:
        ids, size = request.raw.stop_ids if request.raw else [], len(self.template.tokenizer)
        if max(ids, default=0) >= size:
            raise invalid(
                f"stop_token_ids: {max(ids)} is not in the model's vocabulary of {size} tokens",
                "stop_token_ids",
            )

    def _count_overridden(self, settings: dict[str, Any]) -> None:
        for name in exchange.overridden_settings(settings, self.episode.sampling):
            metrics.GATEWAY_OVERRIDDEN.labels(setting=name).inc()

    def _tokens_for(self, turn: Turn) -> int:
        """Return the most tokens that a turn may have. Raises GatewayError if that is 0."""
        if turn.prompt_length > self.max_prompt_tokens:
            raise too_long(
                f"{turn.prompt_length} tokens; at most {self.max_prompt_tokens} fit before a "
                "response (the model's context less sampling.maxResponseTokens)"
            )
        room = self._tokens_left(turn) - (0 if turn.is_summary else self._summary_reserve)
        if room <= 0:
            most = self.episode.sampling["max_new_tokens"]
            raise too_long(
                f"the response has reached its limit of {most} tokens (sampling.maxResponseTokens)"
            )
        return room

    def _check_limits(self, turn: Turn) -> None:
        """Raise GatewayError if the turn, or the branch that it begins, exceeds the limits."""
        turns, branches = self.conversation.counts_including(turn)
        for name, count in (("turns", turns), ("branches", branches)):
            if count > (limit := getattr(self.limits, name)):
                raise too_long(
                    f"the episode has reached its limit of {limit} {name} (rollout.limits.{name})"
                )

    def _tokens_left(self, turn: Turn) -> int:
        """Tokens of the response that are left when the turn begins."""
        max_response = int(self.episode.sampling["max_new_tokens"])
        return max_response - (turn.context_length - turn.prompt_length)

    async def _generate(self, turn: Turn, request: TurnRequest, stream: TurnStream | None) -> float:
        """Have the engine finish a turn, which may have tokens already. Returns the seconds."""
        if self.episode.ended:
            # The error itself is not raised again: its traceback would keep this turn in memory.
            raise _refusal(self.episode.ended)
        if request.raw and (self._tokens_left(turn) <= 0 or request.max_tokens == 0):
            turn.finish = "length"
            return 0.0
        self._check_limits(turn)
        room = self._tokens_for(turn)
        self._check_sampled(turn)
        turn_limit = room if turn.is_summary else self.limits.turn_tokens or room
        left = min(room, request.max_tokens or room, turn_limit) - len(turn.tokens)
        sample = Sample(index=self.episode.sample.index, images=list(turn.all_images))
        sample.append_prompt(turn.context.tolist())
        sample.append(turn.tokens.tolist(), turn.log_probs.tolist(), turn.spans)
        record: dict[str, Any] = {"length": len(turn.tokens)}
        start = time.monotonic()
        try:
            images = await self._stored_images(request, sample.images)
            with self.images.group.holding(images):
                if stream:
                    stream.prompt_tokens = turn.context_length
                    stream.add(turn.tokens.tolist())
                on_tokens = stream.add if stream else None
                end = await self.episode.speak(
                    record, self._sampling(request), left, sample, on_tokens
                )
        except (EngineError, EpisodeEndError) as error:
            raise _refusal(error) from error
        finally:
            turn.tokens = sample.tokens[sample.prompt_length :]
            turn.log_probs, turn.spans = sample.rollout_log_probs, sample.weight_versions
            turn.experts = sample.routed_experts
        turn.finish, turn.stop = record["finish"], record.get("stop")
        turn.cached_tokens = end.cached_tokens or 0
        return time.monotonic() - start

    def _check_sampled(self, turn: Turn) -> None:
        """Raise GatewayError if an earlier answer has a token that stands for an image.

        The engine would look for that image.
        """
        if any(self.images.has_media_token(earlier.tokens.tolist()) for earlier in turn.path[:-1]):
            raise too_long("the model has generated the placeholder of an image")

    async def _stored_images(
        self, request: TurnRequest, digests: Sequence[str]
    ) -> Mapping[str, Image]:
        """Return the images of a turn once the buffer has them. The sample fails if it does not."""
        if not digests:
            return {}
        try:
            with self.episode.time_limit.at_engine():
                return await self.images.stored(request, digests)
        except (rpc.RefusedError, rpc.DeadlineError) as error:
            failure = PlayFailedError("images", f"cannot store an image of its agent: {error}")
            self.episode.ended = failure
            raise unavailable(str(failure)) from error

    def _sampling(self, request: TurnRequest) -> dict[str, Any]:
        """Return the job's sampling parameters, with the client's stops added."""
        sampling = dict(self.episode.sampling)
        stop_ids = request.raw.stop_ids if request.raw else []
        for name, more in (("stop", request.stop), ("stop_token_ids", stop_ids)):
            if more:
                sampling[name] = [*dict.fromkeys([*(sampling.get(name) or []), *more])]
        return sampling

    def _answer(self, turn: Turn, request: TurnRequest, stream: TurnStream | None) -> Answer:
        """Make the answer for a finished turn, and remember it for the client's next request."""
        tokens = turn.tokens.tolist()
        text = self.episode.generator.text(tokens, turn.stop)
        tool_calls: list[AnswerToolCall] = []
        if request.tools and request.calls:
            whole = self.template.tokenizer.decode(self._without_end_token(turn, tokens))
            rest, tool_calls = tool_call_parser.parse(whole, request.tools, self.parser)
            text = _before_calls(whole, rest) if tool_calls else text
        finish = "tool_calls" if tool_calls and turn.finish == "stop" else turn.finish
        if request.raw:
            text = self._raw_text(turn, tokens, request.raw)
        if stream:
            stream.prompt_tokens = turn.context_length
            text = stream.finish(text, turn.stop, has_calls=bool(tool_calls))
        sampled = list(zip(tokens, turn.log_probs.tolist(), strict=True))
        answer = Answer(
            text,
            tool_calls,
            finish,
            turn.context_length,
            len(tokens),
            turn.stop,
            sampled,
            turn.cached_tokens,
        )
        self._remember(turn, request, answer)
        return answer

    def _raw_text(self, turn: Turn, tokens: list[int], raw: RawFormat) -> str:
        """Decode a turn as SGLang does."""
        kept = tokens if raw.keep_stop else self._without_end_token(turn, tokens)
        tokenizer = self.template.tokenizer
        text: str = tokenizer.decode(kept, skip_special_tokens=raw.skip_special_tokens)
        return text if raw.keep_stop else text.removesuffix(turn.stop or "")

    def _without_end_token(self, turn: Turn, tokens: list[int]) -> list[int]:
        """Remove the token that ends a turn.

        Special tokens cannot all be skipped, because those that mark tool calls may be special.
        """
        ended = turn.finish == "stop" and not turn.stop and tokens
        return tokens[:-1] if ended and tokens[-1] in self.template.special else tokens

    def _remember(self, turn: Turn, request: TurnRequest, answer: Answer) -> None:
        tokens = turn.tokens.tolist()
        self._call_counts[turn] = len(answer.calls)
        self.tool_arguments |= {call.id: call.arguments for call in answer.calls}
        entry = {CALLS: sum(self._call_counts.values()), ANSWER: answer.text}
        if self.seat:
            self.episode.metadata.setdefault(SEATS, {})[self.seat] = entry
        else:
            self.episode.metadata.update(entry)
        if request.prompt is None:
            raw = self.episode.generator.decode(tokens)
            self.history.remember([*request.messages, answer.message], request.tools, turn, raw)
        elif isinstance(request.prompt, str) and tokens and (request.raw or not turn.stop):
            self._completion_turns[request.prompt + answer.text] = turn


@dataclass(frozen=True, slots=True)
class AuthenticatedSession:
    """An agent's session that a key has opened. Runs its requests until the episode ends.

    The requests run in the context of the group's task, so that time, tokens and failures of the
    engine are attributed to the group (`sluice_rollout.generate.REQUESTS`).
    """

    agent: AgentSession
    context: contextvars.Context
    tasks: set[asyncio.Task[Reply]] = field(default_factory=set)

    async def reply(self, request: TurnRequest, stream: TurnStream | None = None) -> Reply:
        """Generate the model's turn. `stream` gets its text meanwhile.

        Raises GatewayError, also if the episode ends before the turn does.
        """
        # Each request has a copy, so that spans of concurrent requests are not nested.
        context = self.context.copy()
        task = asyncio.create_task(self.agent.reply(request, stream), context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the client has disconnected
            raise unavailable("the episode has ended") from None

    def end(self) -> None:
        """Cancel requests that are still running."""
        for task in self.tasks:
            task.cancel()


def _before_calls(whole: str, rest: str) -> str:
    """Return the text of a turn before its calls, with the space that a stream has begun with."""
    text = rest.strip()
    start = len(whole) - len(whole.lstrip())
    return whole[:start] + text if text and whole.startswith(text, start) else text


def _refusal(ended: BaseException) -> GatewayError:
    """Make the answer to a request that the engine refuses, or that comes after the episode."""
    if isinstance(ended, EpisodeTimeError):
        return too_long(f"the episode {ended}")
    return (invalid if isinstance(ended, PromptRefusedError) else unavailable)(str(ended))
