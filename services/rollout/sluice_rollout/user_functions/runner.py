"""Runs the user's generate function, or program, for samples.

An error of the function fails its samples, which say what happened, and never the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sluice.api.groups.episode import EpisodeLimits
from sluice.engines.protocol import EngineError, PromptRefusedError
from sluice.runtime import error_summary
from sluice.samples.sample import Prompt, Sample, SampleError, SampleStatus
from sluice.samples.turns import BRANCH_TURNS, MODEL, TIMED_OUT, TURNS
from sluice.telemetry import failure_log, tracing
from sluice_rollout import metrics
from sluice_rollout.episode import (
    EPISODE_TIMEOUT,
    Episode,
    EpisodeEndError,
    EpisodeTimeError,
    InterruptedEpisodeError,
    Play,
    PlayFailedError,
    TruncatedError,
)
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.gateway.images import ImageGate
from sluice_rollout.gateway.interfaces import errors
from sluice_rollout.generate import Generator
from sluice_rollout.user_functions.threads import contained
from sluice_rollout.user_functions.time_limit import TimeLimit


@dataclass(slots=True)
class EpisodeRunner:
    """Plays samples with one function, or program."""

    play: Play
    name: str
    generator: Generator
    tokenizer: Any
    # Time limit between two turns of the model, such as that of tools.
    seconds: float
    reward_key: str | None = None
    # Opens the gateway to an episode.
    open_gateway: Callable[[Episode], Gateway] | None = None
    seats: tuple[str, ...] = ()
    # Reads and stores images of observations; None if the job's model gets none.
    image_gate: ImageGate | None = None
    # Limits of the whole episode (`rollout.limits`).
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)

    @property
    def whole_group(self) -> bool:
        """True if the function takes all samples of a prompt in one call."""
        return bool(getattr(self.play, "whole_group", False))

    async def __call__(
        self, prompt: Prompt, ids: list[int], sample: Sample, sampling: dict[str, Any]
    ) -> Sample:
        """Play one sample, which is changed and returned."""
        if not sample.status.finished:
            await self.run_group(prompt, ids, [sample], sampling)
        return sample

    async def run_group(
        self, prompt: Prompt, ids: list[int], samples: list[Sample], sampling: dict[str, Any]
    ) -> None:
        """Play samples in one call, until they are finished, or aborted by a drain.

        The samples are changed.
        """
        limits = self.limits
        time_limit = TimeLimit(self.seconds, limits.seconds, limits.on_timeout == "truncate")
        for sample in samples:
            if not len(sample.tokens):
                sample.append_prompt(ids)
        episodes = [
            Episode(
                prompt,
                sample,
                self.tokenizer,
                dict(sampling),
                self.generator,
                time_limit,
                self.reward_key,
                self.open_gateway,
                self.seats,
                image_gate=self.image_gate,
            )
            for sample in samples
        ]
        try:
            with tracing.span("episode", samples=[sample.index for sample in samples]):
                raised = await self._outcome(episodes, time_limit)
                self._conclude_all(episodes, raised, time_limit)
                tracing.set_attributes(
                    status=[str(sample.status) for sample in samples],
                    tokens=sum(sample.trainable_tokens for sample in samples),
                )
        finally:
            time_limit.close()
            for episode in episodes:
                episode.leave(interrupted=True)

    async def _outcome(
        self, episodes: list[Episode], time_limit: TimeLimit
    ) -> BaseException | None:
        """Run the function and return its exception.

        A drain ends the function: at once if it has no request at the engine, else after its turn.
        """
        running = asyncio.create_task(self._timed(episodes, time_limit))
        draining = asyncio.create_task(self.generator.draining.wait())
        try:
            await asyncio.wait({running, draining}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await time_limit.idle.wait()
                running.cancel()
                await asyncio.wait({running})
        finally:
            running.cancel()
            draining.cancel()
        if running.cancelled():
            return InterruptedEpisodeError("the pod ends")
        return running.exception()

    async def _timed(self, episodes: list[Episode], time_limit: TimeLimit) -> None:
        async with asyncio.timeout(None) as timeout:
            time_limit.start(timeout)
            playing = contained(self.play(episodes if self.whole_group else episodes[0]))  # type: ignore[arg-type]
            if getattr(self.play, "judges_after_time", False):
                await playing
            else:
                await episodes[0].in_time(playing)

    def _conclude_all(
        self, episodes: list[Episode], raised: BaseException | None, time_limit: TimeLimit
    ) -> None:
        """Set the status of all samples. A group that was interrupted is played again as a whole.

        Raises EngineError if the engine is lost, which is not the function's fault.
        """
        ends = [episode.ended or raised for episode in episodes]
        for error in ends:
            if isinstance(error, EngineError) and not isinstance(error, PromptRefusedError):
                raise error
        drained = self.generator.draining.is_set()
        interrupted = any(isinstance(end, InterruptedEpisodeError) for end in ends)
        truncated = errors.truncated(raised)
        for episode, end in zip(episodes, ends, strict=True):
            broken = raised or _unsendable(episode.sample)
            episode.leave(interrupted=interrupted or (drained and broken is not None))
            if isinstance(end, PromptRefusedError):
                self._fail(episode.sample, "refused", str(end))
            elif interrupted or (drained and broken is not None):
                _abort(episode.sample)
            elif isinstance(end, PlayFailedError):
                self._fail(episode.sample, end.reason, str(end))
            elif broken is not None and not (isinstance(broken, EpisodeEndError) or truncated):
                self._blame(episode.sample, broken, time_limit)
            else:
                late = [e for e in (episode.ended, raised) if isinstance(e, EpisodeTimeError)]
                if late:
                    metrics.EPISODE_TIMEOUTS.labels(outcome="truncated").inc()
                    episode.metadata[TIMED_OUT] = str(late[0])
                cut = bool(late) or isinstance(episode.ended, TruncatedError)
                self._finish(episode, truncated=truncated or cut)

    def _blame(self, sample: Sample, raised: BaseException, time_limit: TimeLimit) -> None:
        """Fail the sample by what the function raised."""
        if isinstance(raised, TimeoutError) and time_limit.expired:
            text = (
                f"took more than {self.seconds:g} s outside of the engine (rollout.functionSeconds)"
            )
            self._fail(sample, "timeout", text, error_summary.formatted_traceback(raised))
            return
        if isinstance(raised, PlayFailedError):
            self._fail(sample, raised.reason, str(raised))
            return
        self._fail(
            sample,
            "raised",
            f"raised {error_summary.cause(raised)}",
            error_summary.formatted_traceback(raised),
        )

    def _finish(self, episode: Episode, *, truncated: bool) -> None:
        sample = episode.sample
        turns = sample.metadata.get(TURNS, [])
        if not any(turn["by"] == MODEL and turn["length"] for turn in turns):
            self._fail(sample, "empty", "ended before the model generated a token")
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
            sample.check_values()
        except SampleError as error:
            self._fail(sample, "broken", f"left a broken sample: {error}")

    def _fail(self, sample: Sample, reason: str, message: str, details: str = "") -> None:
        metrics.FUNCTION_FAILURES.labels(reason=reason).inc()
        if reason == EPISODE_TIMEOUT:
            metrics.EPISODE_TIMEOUTS.labels(outcome="failed").inc()
        line = f"{self.name} {message}"
        failure_log.LOG.note("an episode failed", line, details, index=sample.index)
        sample.fail(line)
        if _unsendable(sample):
            sample.metadata = {TURNS: sample.metadata.get(TURNS, [])}
            sample.response, sample.reward_parts = "", {}
        if len(sample.rollout_log_probs) != sample.response_length:
            sample.cut(0)


def _abort(sample: Sample) -> None:
    """Mark a sample to be played again elsewhere, with its tokens and turns."""
    sample.status = SampleStatus.ABORTED
    sample.reward, sample.reward_parts, sample.seat_rewards = None, {}, {}
    kept = {name: sample.metadata[name] for name in (BRANCH_TURNS,) if name in sample.metadata}
    sample.metadata = {TURNS: sample.metadata.get(TURNS, [])} | kept


def _unsendable(sample: Sample) -> PlayFailedError | None:
    """Return an error if the function left what cannot be sent, such as an object as metadata."""
    try:
        sample.check_values()
    except SampleError as error:
        return PlayFailedError("broken", f"left a broken sample: {error}")
    return None
