"""Runs a user's generate function for one sample. Whatever it does, the run goes on; its sample tells what happened."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sluice.environment import ConfigurationError
from sluice.rewards import custom
from sluice.sample import Prompt, Sample, SampleError, SampleStatus
from sluice.telemetry import logs
from sluice_rollout import metrics
from sluice_rollout.engine import EngineError, PromptRefusedError
from sluice_rollout.episode import MODEL, TURNS, Episode, EpisodeEndError, InterruptedEpisodeError, TruncatedError
from sluice_rollout.generate import Generator

Play = Callable[[Episode], Awaitable[None]]


def load(dotted: str | None) -> Play | None:
    """The user's function; None where there is none. ConfigurationError: it cannot be loaded, or is not async."""
    if dotted is None:
        return None
    try:
        function = custom.load(dotted)
    except custom.LoadError as error:
        raise ConfigurationError(f"spec.rollout.function: {error}") from error
    if not any(inspect.iscoroutinefunction(f) for f in (function, getattr(function, "__call__", None))):  # noqa: B004
        raise ConfigurationError(f"spec.rollout.function: {dotted} is not async: expected `async def play(episode)`")
    return function


@dataclass(slots=True)
class Player:
    """Plays samples with one function.

    seconds: how long it may take between two turns of the model (its tools).
    """

    play: Play
    name: str
    generator: Generator
    tokenizer: Any
    version: Callable[[], int]
    seconds: float
    reward_key: str | None = None

    async def __call__(self, prompt: Prompt, ids: list[int], sample: Sample, sampling: dict[str, Any]) -> Sample:
        """Play until the sample is finished, or aborted by a drain. The sample is changed and returned."""
        if sample.status.finished:
            return sample
        if not len(sample.tokens):
            sample.append_prompt(ids)
        episode = Episode(
            prompt, sample, self.tokenizer, dict(sampling), self.generator, self.version, self.reward_key, self.seconds
        )
        outcome = await self._outcome(episode)
        self._conclude(episode, outcome)
        return sample

    async def _outcome(self, episode: Episode) -> BaseException | None:
        """What the function raised. A drain ends it: at once while it is outside of the engine, else with its turn."""
        running = asyncio.create_task(self._timed(episode))
        draining = asyncio.create_task(self.generator.draining.wait())
        try:
            await asyncio.wait({running, draining}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await episode.engine_free.wait()
                running.cancel()
                await asyncio.wait({running})
        finally:
            running.cancel()
            draining.cancel()
        if running.cancelled():
            return InterruptedEpisodeError("the pod ends")
        return running.exception()

    async def _timed(self, episode: Episode) -> None:
        async with asyncio.timeout(None) as deadline:
            episode.deadline = deadline
            episode.start_clock()
            await self.play(episode)

    def _conclude(self, episode: Episode, raised: BaseException | None) -> None:
        """The sample's status. What ended the episode goes before what the function made of that.

        Raises EngineError where the engine is gone: no fault of the function's.
        """
        sample, ended = episode.sample, episode.ended or raised
        raised = raised or _not_json(sample.metadata)
        drained = self.generator.draining.is_set()
        if isinstance(ended, PromptRefusedError):
            self._fail(sample, "refused", str(ended))
        elif isinstance(ended, EngineError):
            raise ended
        elif isinstance(ended, InterruptedEpisodeError) or (drained and raised is not None):
            sample.status = SampleStatus.ABORTED
            sample.reward, sample.reward_parts = None, {}
            sample.metadata = {TURNS: sample.metadata.get(TURNS, [])}  # the function will be here again
        elif isinstance(raised, TimeoutError) and episode.deadline and episode.deadline.expired():
            self._fail(sample, "timeout", f"took more than {self.seconds:g} s outside of the engine")
        elif raised is not None and not isinstance(raised, EpisodeEndError):
            logs.get().warning("rollout.function raised", function=self.name, exc_info=raised)
            self._fail(sample, "raised", f"raised {type(raised).__name__}: {raised}"[:2000])
        else:
            self._finish(episode, truncated=isinstance(ended, TruncatedError))

    def _finish(self, episode: Episode, *, truncated: bool) -> None:
        sample = episode.sample
        turns = sample.metadata.get(TURNS, [])
        if not any(turn["by"] == MODEL and turn["length"] for turn in turns):
            self._fail(sample, "empty", "returned before the model generated a token")
            return
        last = turns[-1]
        if not sample.status.finished:
            truncated = truncated or (last["by"] == MODEL and last["finish"] == "length")
            sample.status = SampleStatus.TRUNCATED if truncated else SampleStatus.COMPLETED
        if not sample.response:
            tokens = sample.tokens[sample.prompt_length :].tolist()
            sample.response = self.generator.text(tokens, last.get("stop"))
        try:
            sample.check_tokens()
        except SampleError as error:
            self._fail(sample, "broken", f"left a broken sample: {error}")

    def _fail(self, sample: Sample, reason: str, message: str) -> None:
        metrics.FUNCTION_FAILURES.labels(reason=reason).inc()
        sample.fail(f"{self.name} {message}")
        if _not_json(sample.metadata):
            sample.metadata = {TURNS: sample.metadata.get(TURNS, [])}
        if len(sample.rollout_log_probs) != sample.response_length:
            sample.cut(0)


def _not_json(metadata: dict[str, Any]) -> TypeError | ValueError | None:
    try:
        json.dumps(metadata)
    except (TypeError, ValueError) as error:
        return type(error)(f"episode.metadata cannot be written as JSON: {error}")
    return None
