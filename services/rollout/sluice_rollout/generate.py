"""Generates one sample: from a prompt's tokens, or a partial response, to a finished response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sluice.api import EvaluationSampling, Sampling
from sluice.engines.protocol import (
    Client,
    EngineError,
    Generation,
    PromptRefusedError,
    RequestTimeoutError,
)
from sluice.images.image import Image
from sluice.samples.sample import Sample, SampleStatus, WeightSpan
from sluice.telemetry import tracing
from sluice_rollout import metrics
from sluice_rollout.health import EngineHealth, EngineLostError

# If the requests of this many groups fail without an answer between, the engine is at fault.
FAILED_GROUPS = 8
_PAUSE_AFTER_ABORT_SECONDS = 0.2
# How often, and at which distance, a request is aborted before it is given up with its tokens.
_ABORTS, _PAUSE_BETWEEN_ABORTS_SECONDS = 10, 1.0
# Seconds before a request is repeated that a healthy engine has failed to answer.
_PAUSES_AFTER_ERRORS = (0.5, 2.0)


@dataclass(slots=True)
class GroupRequests:
    """Requests of one group to the engine."""

    group_id: int
    # Requests that are at the engine, or have just failed there.
    at_engine: int = 0
    # Time at the engine, and tokens from it, of all answered requests.
    seconds: float = 0.0
    tokens: int = 0
    # Passes in which the engine verified proposed tokens.
    speculative_passes: int = 0
    # Images of the group's prompt, and those that running requests need (`holding`), by digest.
    images: dict[str, Image] = field(default_factory=dict)
    # Digests of images that were stored for this lease with PutImages, one request at a time.
    stored: set[str] = field(default_factory=set)
    storing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _holders: Counter[str] = field(default_factory=Counter)

    @property
    def latency(self) -> float | None:
        """Seconds per token: the time of requests by the length of their answers.

        The vLLM paper calls it normalized latency. None without answers.
        """
        return self.seconds / self.tokens if self.tokens else None

    @contextmanager
    def running(self) -> Iterator[None]:
        self.at_engine += 1
        try:
            yield
        finally:
            self.at_engine -= 1

    @contextmanager
    def holding(self, images: Mapping[str, Image]) -> Iterator[None]:
        """Keep images that are not the prompt's while a request needs them."""
        held = [name for name in images if name in self._holders or name not in self.images]
        for name in held:
            self.images[name] = images[name]
            self._holders[name] += 1
        try:
            yield
        finally:
            for name in held:
                self._holders[name] -= 1
                if not self._holders[name]:
                    del self._holders[name], self.images[name]


# Requests of the group that the current task, and every task that it starts, works on. The default
# serves code outside of a group.
REQUESTS: ContextVar[GroupRequests] = ContextVar("requests", default=GroupRequests(-1))  # noqa: B039


def images_of_group(digests: list[str]) -> list[Image]:
    """Return images of the group that the current task works on."""
    images = REQUESTS.get().images
    return [images[digest] for digest in digests]


# Gets new tokens of a turn, in order and each once.
OnTokens = Callable[[list[int]], None]


@dataclass(slots=True)
class _ReceivedParts:
    """The parts of an answer that have come so far. They stay sampled if the request fails."""

    on_tokens: OnTokens
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)

    def add(self, part: Generation) -> None:
        start = len(self.tokens)
        self.tokens += part.tokens
        self.log_probs += part.log_probs
        self.spans += [
            WeightSpan(span.version, start + span.start, start + span.end) for span in part.spans
        ]
        self.on_tokens(part.tokens)

    def completed_by(self, answer: Generation) -> Generation:
        """Pass the rest of the whole answer on, and return the answer.

        SGLang forgets the tokens of a request that it aborts while it is queued again.
        """
        if len(answer.tokens) < len(self.tokens):
            return self.aborted()
        self.on_tokens(answer.tokens[len(self.tokens) :])
        return answer

    def aborted(self) -> Generation:
        """Return the parts as an answer that was cut off after them."""
        return Generation(self.tokens, self.log_probs, self.spans, "abort", None)


@dataclass(slots=True)
class Generator:
    """Generates samples at one engine, with a limited number of requests at a time.

    Each weight version has a separate prefix cache. While requests run, as in asynchronous
    training, an engine cannot empty its cache, and entries of old weights that all prompts share
    would stay for ever.
    """

    engine: Client
    decode: Callable[[list[int]], str]
    slots: asyncio.Semaphore
    # Version of the engine's weights.
    version: Callable[[], int]
    health: EngineHealth
    # Token that stands for an image; None if the job's model gets no images.
    placeholder: int | None = None
    # Tokens by which an engine finds images and videos in a prompt.
    media_tokens: frozenset[int] = frozenset()
    # If set, no request is sent, and unfinished samples stay `aborted`, to be continued elsewhere.
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    # Groups whose requests have failed since the engine last answered one.
    failed: set[int] = field(default_factory=set)

    async def __call__(
        self, prompt_ids: list[int], sample: Sample, sampling: dict[str, Any]
    ) -> Sample:
        """Generate until the sample is finished, or aborted by a drain.

        The sample is changed and returned.
        """
        if not len(sample.tokens):
            sample.append_prompt(prompt_ids)
        if sample.status.finished:
            return sample
        try:
            end = await self.turn(
                sample, sampling, sampling["max_new_tokens"] - sample.response_length
            )
        except PromptRefusedError as error:
            sample.fail(str(error))
            return sample
        if end is None:
            sample.status = SampleStatus.ABORTED
            return sample
        sample.status = SampleStatus.COMPLETED if end.finish == "stop" else SampleStatus.TRUNCATED
        if end.matched_stop:
            sample.metadata["matched_stop"] = end.matched_stop
        sample.response = self.text(
            sample.tokens[sample.prompt_length :].tolist(), end.matched_stop
        )
        return sample

    async def turn(
        self,
        sample: Sample,
        sampling: dict[str, Any],
        room: int,
        on_tokens: OnTokens | None = None,
        over: asyncio.Event | None = None,
    ) -> Generation | None:
        """Append the model's next turn, at most `room` tokens; return all of it with its end.

        `on_tokens` gets its tokens as they come. Tokens that it has got are appended to the sample
        whatever happens then.

        Returns None if a drain cuts the turn off. The end is `abort` if `over` does, which is set
        when the episode's time has passed. Any other abort comes from a weight update that ends
        running requests: generation goes on from the tokens so far, under the new weights.

        Raises
        ------
        PromptRefusedError
            If the engine will never take the request.
        EngineError
            If the engine fails.

        """
        before, cached = sample.response_length, None
        while (left := room - (sample.response_length - before)) > 0:
            if self.has_sampled_placeholder(sample):
                break
            if over and over.is_set():
                return self._whole_turn(sample, before, "abort", None, cached)
            limited = sampling | {"max_new_tokens": left}
            answer = await self._request(sample, limited, on_tokens, over)
            if answer is None:
                return None
            cached = answer.cached_tokens if cached is None else cached
            if answer.finish in ("stop", "length"):
                return self._whole_turn(sample, before, answer.finish, answer.matched_stop, cached)
            if not answer.tokens and not (over and over.is_set()):
                await asyncio.sleep(_PAUSE_AFTER_ABORT_SECONDS)
        return self._whole_turn(sample, before, "length", None, cached)

    def has_sampled_placeholder(self, sample: Sample) -> bool:
        """Return True if the model has generated a token that stands for an image or a video.

        The response cannot be continued then: the engine would look for that image.
        """
        response = sample.tokens[sample.prompt_length :][sample.loss_mask == 1]
        return bool(self.media_tokens) and not self.media_tokens.isdisjoint(response.tolist())

    def _whole_turn(
        self,
        sample: Sample,
        before: int,
        finish: str,
        matched_stop: str | None,
        cached_tokens: int | None,
    ) -> Generation:
        start = sample.prompt_length + before
        tokens, log_probs = (
            sample.tokens[start:].tolist(),
            sample.rollout_log_probs[before:].tolist(),
        )
        return Generation(tokens, log_probs, [], finish, matched_stop, cached_tokens=cached_tokens)

    async def _request(
        self,
        sample: Sample,
        sampling: dict[str, Any],
        on_tokens: OnTokens | None,
        over: asyncio.Event | None,
    ) -> Generation | None:
        """Send one request; return None in a drain."""
        with metrics.REQUESTS_WAITING.track_inprogress():
            await self.slots.acquire()
        received = _ReceivedParts(on_tokens) if on_tokens else None
        answer = None
        try:
            if self.draining.is_set():
                return None
            if over and over.is_set():
                return _nothing()
            with REQUESTS.get().running():
                answer = await self._answer_with_retries(sample, sampling, received, over)
        finally:
            self.slots.release()
            if kept := answer or (received and received.aborted()):
                sample.append(kept.tokens, kept.log_probs, kept.spans)
                if kept.experts is not None:
                    sample.routed_experts = kept.experts
        return answer

    async def _answer_with_retries(
        self,
        sample: Sample,
        sampling: dict[str, Any],
        received: _ReceivedParts | None,
        over: asyncio.Event | None,
    ) -> Generation | None:
        """Return the engine's answer, after up to three attempts: an error may be transient.

        If a part of the answer has come, it is returned as an aborted answer instead of another
        attempt. Returns None in a drain. Raises EngineLostError if the engine is at fault; any
        other EngineError concerns the request.
        """
        for pause in (*_PAUSES_AFTER_ERRORS, None):
            try:
                answer = await self._answer(sample, sampling, received, over)
            except PromptRefusedError:
                self._engine_answered()
                raise
            except EngineError as error:
                if self.draining.is_set():
                    # The pod ends, and its engine ended first. The tokens so far go back.
                    return None
                await self.health.must_live(error)
                if pause is None or isinstance(error, RequestTimeoutError):
                    self._note_failed(error)
                    raise
                await asyncio.sleep(pause)
                if received and received.tokens:
                    return received.aborted()
                if over and over.is_set():
                    return _nothing()
            else:
                self._engine_answered()
                return answer
        raise AssertionError("the last attempt returns or raises")

    async def _answer(
        self,
        sample: Sample,
        sampling: dict[str, Any],
        received: _ReceivedParts | None,
        over: asyncio.Event | None,
    ) -> Generation:
        """Return the engine's answer to one request, and count it."""
        finish, started = "error", time.monotonic()
        with (
            metrics.REQUESTS_AT_ENGINE.track_inprogress(),
            metrics.REQUEST_SECONDS.time(),
            tracing.span("generate", sample=sample.index, tokens_before=len(sample.tokens)),
        ):
            try:
                generating = self.engine.generate(
                    rid := uuid.uuid4().hex,
                    sample.tokens.tolist(),
                    sampling,
                    cache=str(self.version()),
                    images=images_of_group(sample.images),
                    on_part=received.add if received else None,
                )
                generation = await self._until(over, rid, generating)
                if received:
                    generation = received.completed_by(generation)
                finish = generation.finish
                tracing.set_attributes(
                    finish=finish,
                    tokens=len(generation.tokens),
                    cached_tokens=generation.cached_tokens or 0,
                )
            except PromptRefusedError:
                finish = "refused"
                raise
            finally:
                metrics.REQUESTS.labels(finish).inc()
        metrics.PROMPT_TOKENS.inc(sample.length)
        metrics.CACHED_TOKENS.inc(generation.cached_tokens or 0)
        metrics.GENERATED_TOKENS.inc(len(generation.tokens))
        metrics.SPECULATIVE_PASSES.inc(generation.speculative_passes)
        requests = REQUESTS.get()
        requests.seconds += time.monotonic() - started
        requests.tokens += len(generation.tokens)
        requests.speculative_passes += generation.speculative_passes
        return generation

    async def _until(
        self, over: asyncio.Event | None, rid: str, generating: Coroutine[Any, Any, Generation]
    ) -> Generation:
        """Return an answer. If `over` is set first, abort its request, which keeps its tokens."""
        if over is None:
            return await generating
        request, end = asyncio.create_task(generating), asyncio.create_task(over.wait())
        try:
            await asyncio.wait({request, end}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                # An engine forgets an abort that overtakes its request, so it is repeated.
                for _ in range(_ABORTS):
                    with suppress(EngineError):  # then the request is given up below
                        await self.engine.abort(rid)
                    await asyncio.wait({request}, timeout=_PAUSE_BETWEEN_ABORTS_SECONDS)
                    if request.done():
                        break
                else:
                    return _nothing()
            return request.result()
        finally:
            end.cancel()
            if not request.done():
                request.cancel()
                await asyncio.wait({request})

    def _engine_answered(self) -> None:
        self.failed.clear()
        self.health.progress()

    def _note_failed(self, error: EngineError) -> None:
        self.failed.add(REQUESTS.get().group_id)
        if (count := len(self.failed)) < FAILED_GROUPS:
            return
        raise EngineLostError(
            f"engine {self.engine.url}: its health checks pass, but it has failed the requests of "
            f"{count} groups in a row; the last: {error}",
            blames=False,
        ) from error

    def text(self, tokens: list[int], matched_stop: str | None) -> str:
        """Return response tokens as text, without the stop string that ended them."""
        return self.decode(tokens).removesuffix(matched_stop or "")


def _nothing() -> Generation:
    """Make the answer of a request that was aborted before it began."""
    return Generation([], [], [], "abort", None)


def sampling_params(
    sampling: Sampling, override: EvaluationSampling | None = None
) -> dict[str, Any]:
    """Return sampling parameters by SGLang's names."""
    chosen = sampling.model_dump(exclude={"stop", "max_response_tokens"})
    length = sampling.max_response_tokens
    if override is not None:
        chosen |= override.model_dump(exclude_none=True, exclude={"max_response_tokens"})
        length = override.max_response_tokens or length
    return chosen | {
        "max_new_tokens": length,
        "stop": sampling.stop or None,
        "skip_special_tokens": True,
    }
