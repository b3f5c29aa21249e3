"""A teacher behind a server of the user's, which scores each finished response token by token.

A sample costs one request, and one more for each of its branches, from the first trained token to
the last. Servers score given tokens at temperature 1; so does the student sample, by a rule of the
API. A teacher that cannot be reached fails the sample, never the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from sluice.api import RLJobSpec
from sluice.engines import engine_of
from sluice.engines.protocol import Scorer, ScoringError
from sluice.images.image import Image
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Float32, Prompt, Sample, TokenSequence
from sluice.telemetry import failure_log, logs
from sluice_rollout import metrics
from sluice_rollout.generate import images_of_group

FIELD = "spec.algorithm.distillation.teacher.url"
PROBED_TOKENS = 2048
LOG_SECONDS = 30.0


class TeacherError(Exception):
    """The teacher did not become ready in time. The message says what it did instead."""


class Teacher:
    """A teacher, by its URL."""

    def __init__(self, url: str, scorer: Scorer, tokenizer: Any, field: str = FIELD) -> None:
        self.url = url
        self._scorer = scorer
        # The job's field that names this teacher, for messages.
        self._field = field
        # The student's.
        self._tokenizer, self._vocabulary = tokenizer, len(tokenizer)

    async def close(self) -> None:
        await self._scorer.close()

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server answers, and check that its tokens are the student's.

        Raises
        ------
        TeacherError
            If it does not answer in time.
        ConfigurationError
            If its tokens differ, or it is another kind of server.

        """
        end, logged_at = time.monotonic() + seconds, time.monotonic()
        ids = probe(self._vocabulary)
        while True:
            try:
                theirs = await self._scorer.token_texts(ids)
            except ConfigurationError as error:
                raise ConfigurationError(f"{self._field}: {error}") from error
            except ScoringError as error:
                # For example a server without a tokenizer, which may have log-probs all the same.
                logs.get().warning(
                    "cannot check whether the teacher has the student's tokens",
                    error=str(error),
                )
                return
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failure = f"{self.url} does not answer: {type(error).__name__} {error}"
            else:
                self._compare(ids, theirs)
                return
            if time.monotonic() > end:
                raise TeacherError(f"{self._field}: {failure}; given up after {seconds:.0f} s")
            if time.monotonic() - logged_at > LOG_SECONDS:
                logged_at = time.monotonic()
                logs.get().warning("waiting for the teacher", error=failure)
            await asyncio.sleep(0.5)

    def _compare(self, ids: list[int], theirs: list[str]) -> None:
        ours = [self._tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        others = [(i, a, b) for i, a, b in zip(ids, ours, theirs, strict=True) if a != b]
        if others:
            number, our, their = others[0]
            raise ConfigurationError(
                f"{self._field}: the teacher's tokens are not the student's: {len(others)} of "
                f"{len(ids)} compared tokens differ, such as {number}, which is {our!r} for the "
                f"student and {their!r} for the teacher"
            )

    async def __call__(self, sample: Sample) -> None:
        """Set the teacher_log_probs of the sample and its branches, or fail it with the reason."""
        started = time.monotonic()
        try:
            scores = [await self._scores(sequence) for sequence in sample.sequences]
        except ScoringError as error:
            metrics.TEACHER.labels(outcome=error.reason).inc()
            failure_log.LOG.note("the teacher failed", str(error), index=sample.index)
            sample.fail(f"teacher: {error}")
            return
        metrics.TEACHER.labels(outcome="ok").inc()
        metrics.TEACHER_SECONDS.observe(time.monotonic() - started)
        for sequence, log_probs in zip(sample.sequences, scores, strict=True):
            sequence.teacher_log_probs = log_probs

    async def _scores(self, sequence: TokenSequence) -> Float32:
        """Return log-probs [response] float32, 0 if masked. Raises ScoringError."""
        trained = np.flatnonzero(sequence.loss_mask)
        log_probs = np.zeros(sequence.response_length, dtype=np.float32)
        if len(trained):
            first, end = int(trained[0]), int(trained[-1]) + 1
            tokens = sequence.tokens[: sequence.prompt_length + end].tolist()
            images = images_of_group(sequence.images)
            log_probs[first:end] = await self.log_probs(tokens, end - first, images)
            log_probs = np.where(sequence.loss_mask > 0, log_probs, np.float32(0))
            if not np.isfinite(log_probs).all():
                raise ScoringError("a trained token has no finite log-prob", "invalid")
        return log_probs

    async def log_probs(
        self, tokens: list[int], count: int, images: Sequence[Image] = ()
    ) -> list[float]:
        """Return the log-probs of the last `count` of these tokens. Raises ScoringError."""
        if (highest := max(tokens)) >= self._vocabulary:  # a server may crash on it
            raise ScoringError(
                f"token {highest} cannot be scored: the tokenizer has {self._vocabulary} tokens"
            )
        return await self._scorer.log_probs(tokens, count, images)


class Teachers:
    """All teachers of a job: of data sources that name one, and of all other rows."""

    def __init__(self, default: Teacher, by_source: dict[str, Teacher]) -> None:
        self._default, self._by_source = default, by_source

    @property
    def url(self) -> str:
        return ", ".join(teacher.url for teacher in self._all)

    @property
    def _all(self) -> list[Teacher]:
        return [self._default, *self._by_source.values()]

    async def close(self) -> None:
        for teacher in self._all:
            await teacher.close()

    async def wait_ready(self, seconds: float) -> None:
        """Wait until all teachers are ready. Raises as `Teacher.wait_ready` does."""
        await asyncio.gather(*(teacher.wait_ready(seconds) for teacher in self._all))

    async def __call__(self, prompt: Prompt, sample: Sample) -> None:
        """Score the sample by the teacher of its prompt's row."""
        await self._by_source.get(str(prompt.metadata.get("data_source")), self._default)(sample)


def teacher_of(spec: RLJobSpec, tokenizer: Any) -> Teachers | None:
    """Return the teachers that workers of this job ask; None without any, or with the trainer's."""
    distillation = spec.algorithm.distillation
    if distillation is None or distillation.teacher.url is None:
        return None
    engine, seconds = engine_of(spec), distillation.teacher.timeout_seconds

    def teacher(url: str, field: str) -> Teacher:
        url = url.rstrip("/")
        return Teacher(url, engine.scorer(url, seconds), tokenizer, field)

    by_source = {
        source.data_source: teacher(
            source.url, f"spec.algorithm.distillation.teachers[{index}].url"
        )
        for index, source in enumerate(distillation.teachers)
    }
    return Teachers(teacher(distillation.teacher.url, FIELD), by_source)


def probe(vocabulary: int) -> list[int]:
    """Return ids whose texts are compared: the last 256, which have special tokens, and others.

    The others are spread evenly over the rest.
    """
    step = -(-vocabulary // (PROBED_TOKENS - 256))
    return sorted({*range(0, vocabulary, step), *range(max(vocabulary - 256, 0), vocabulary)})
