"""One sample: from a prompt's tokens, or from a partial response, to a finished response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from sluice.samples.sample import Sample, SampleStatus
from sluice.telemetry import tracing
from sluice_rollout import metrics
from sluice_rollout.health import EngineHealth, EngineLostError

FAILED_GROUPS = 8
"""So many groups whose requests fail, and no answer between: it is not the requests."""
_PAUSE_AFTER_ABORT_SECONDS = 0.2
_PAUSES_AFTER_ERRORS = (0.5, 2.0)
"""Seconds before a request is made again that an engine has failed to answer, though it is well."""


@dataclass(slots=True)
class GroupRequests:
    """Those of one group. at_engine: how many are there now, or have just failed there. seconds,
    tokens: at the engine, and from it, of all that were answered.
    """

    group_id: int
    at_engine: int = 0
    seconds: float = 0.0
    tokens: int = 0

    @property
    def latency(self) -> float | None:
        """Seconds for a token of theirs: a request's time by the length of its answer, as the
        normalized latency of the vLLM paper has it. None: they have none.
        """
        return self.seconds / self.tokens if self.tokens else None

    @contextmanager
    def asking(self) -> Iterator[None]:
        self.at_engine += 1
        try:
            yield
        finally:
            self.at_engine -= 1


REQUESTS: ContextVar[GroupRequests] = ContextVar("requests", default=GroupRequests(-1))  # noqa: B039 - of who has no group
"""The group for which this task, and all that it starts, asks the engine."""


@dataclass(slots=True)
class Generator:
    """Generates samples at one engine, `concurrency` requests at a time.

    version: of the engine's weights. No request finds what older ones left in the prefix cache:
    while requests run, as in asynchronous training, an engine cannot empty it, and what all prompts
    have in common would stay for ever. `draining` set: no request is sent any more, and what is
    unfinished stays `aborted`, to be continued elsewhere.
    """

    engine: Client
    decode: Callable[[list[int]], str]
    slots: asyncio.Semaphore
    version: Callable[[], int]
    health: EngineHealth
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    failed: set[int] = field(default_factory=set)
    """Groups whose requests have failed since the engine last answered one."""

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

    async def turn(self, sample: Sample, sampling: dict[str, Any], room: int) -> Generation | None:
        """Append what the model says next, at most `room` tokens: all of it, with its end; None:
        cut off by a drain.

        An abort that is not ours comes from a weight update that ends running requests: go on from
        the tokens that are there, under the new weights. Raises PromptRefusedError and EngineError.
        """
        before = sample.response_length
        while (left := room - (sample.response_length - before)) > 0:
            answer = await self._request(sample, sampling | {"max_new_tokens": left})
            if answer is None:
                return None
            if answer.finish in ("stop", "length"):
                return self._whole(sample, before, answer.finish, answer.matched_stop)
            if not answer.tokens:
                await asyncio.sleep(_PAUSE_AFTER_ABORT_SECONDS)
        return self._whole(sample, before, "length", None)

    def _whole(
        self, sample: Sample, before: int, finish: str, matched_stop: str | None
    ) -> Generation:
        start = sample.prompt_length + before
        tokens, log_probs = (
            sample.tokens[start:].tolist(),
            sample.rollout_log_probs[before:].tolist(),
        )
        return Generation(tokens, log_probs, [], finish, matched_stop)

    async def _request(self, sample: Sample, sampling: dict[str, Any]) -> Generation | None:
        """One request; None in a drain."""
        with metrics.REQUESTS_WAITING.track_inprogress():
            await self.slots.acquire()
        try:
            if self.draining.is_set():
                return None
            with REQUESTS.get().asking():
                answer = await self._answered(sample, sampling)
        finally:
            self.slots.release()
        if answer is not None:
            sample.append(answer.tokens, answer.log_probs, answer.spans)
            if answer.experts is not None:
                sample.routed_experts = answer.experts
        return answer

    async def _answered(self, sample: Sample, sampling: dict[str, Any]) -> Generation | None:
        """The engine's answer, if need be at the third attempt: an error may be a hiccup.

        None in a drain. Raises EngineLostError where the error is the engine's; any other
        EngineError is the request's own.
        """
        for pause in (*_PAUSES_AFTER_ERRORS, None):
            try:
                answer = await self._asked(sample, sampling)
            except PromptRefusedError:
                self._engine_answered()
                raise
            except EngineError as error:
                if (
                    self.draining.is_set()
                ):  # the pod ends, and its engine was the first: what the sample had goes back
                    return None
                await self.health.must_live(error)
                if pause is None or isinstance(error, RequestTimeoutError):
                    self._note_failed(error)
                    raise
                await asyncio.sleep(pause)
            else:
                self._engine_answered()
                return answer
        raise AssertionError("the last attempt returns or raises")

    async def _asked(self, sample: Sample, sampling: dict[str, Any]) -> Generation:
        """The engine's answer to one request, counted."""
        finish, started = "error", time.monotonic()
        with (
            metrics.REQUESTS_AT_ENGINE.track_inprogress(),
            metrics.REQUEST_SECONDS.time(),
            tracing.span("generate", sample=sample.index, tokens_before=len(sample.tokens)),
        ):
            try:
                generation = await self.engine.generate(
                    uuid.uuid4().hex, sample.tokens.tolist(), sampling, cache=str(self.version())
                )
                finish = generation.finish
                tracing.note(finish=finish, tokens=len(generation.tokens))
            except PromptRefusedError:
                finish = "refused"
                raise
            finally:
                metrics.REQUESTS.labels(finish).inc()
        metrics.PROMPT_TOKENS.inc(len(sample.tokens))
        metrics.GENERATED_TOKENS.inc(len(generation.tokens))
        requests = REQUESTS.get()
        requests.seconds += time.monotonic() - started
        requests.tokens += len(generation.tokens)
        return generation

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
        """Response tokens as text, without the stop string that ended them."""
        return self.decode(tokens).removesuffix(matched_stop or "")


def sampling_params(
    sampling: Sampling, override: EvaluationSampling | None = None
) -> dict[str, Any]:
    """SGLang's sampling parameters."""
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
