"""A teacher behind a server that somebody runs: it scores each finished response, token by token.

One request for a sample, and one for each of its branches, from the first trained token to the
last. Servers score given tokens at temperature 1; so does the student sample, by a rule of the API.
A teacher that cannot be had fails the sample, never the run.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import numpy as np

from sluice.api import RLJobSpec
from sluice.engines import engine_of
from sluice.engines.protocol import Scorer, ScoringError
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Float32, Prompt, Sample, TokenSequence
from sluice.telemetry import logs
from sluice_rollout import failures, metrics

FIELD = "spec.algorithm.distillation.teacher.url"
PROBED_TOKENS = 2048
LOG_SECONDS = 30.0


class TeacherError(Exception):
    """The teacher did not answer in time. The message says what it did instead."""


class Teacher:
    """One teacher. tokenizer: the student's. field: which of the job's, for messages."""

    def __init__(self, url: str, scorer: Scorer, tokenizer: Any, field: str = FIELD) -> None:
        self.url = url
        self._scorer = scorer
        self._field = field
        self._tokenizer, self._words = tokenizer, len(tokenizer)

    async def close(self) -> None:
        await self._scorer.close()

    async def wait_ready(self, seconds: float) -> None:
        """Wait until it answers, and see that it means the same tokens.

        TeacherError, ConfigurationError.
        """
        end, told = time.monotonic() + seconds, time.monotonic()
        ids = probe(self._words)
        while True:
            try:
                theirs = await self._scorer.token_texts(ids)
            except ConfigurationError as error:
                raise ConfigurationError(f"{self._field}: {error}") from error
            except (
                ScoringError
            ) as error:  # one without a tokenizer, say; log-probs may be had all the same
                logs.get().warning(
                    "whether the teacher has the student's tokens cannot be checked",
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
            if time.monotonic() - told > LOG_SECONDS:
                told = time.monotonic()
                logs.get().warning("waiting for the teacher", error=failure)
            await asyncio.sleep(0.5)

    def _compare(self, ids: list[int], theirs: list[str]) -> None:
        ours = [self._tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        others = [(i, a, b) for i, a, b in zip(ids, ours, theirs, strict=True) if a != b]
        if others:
            number, our, their = others[0]
            raise ConfigurationError(
                f"{self._field}: the teacher's tokens are not the student's: {len(others)} of "
                f"{len(ids)} that were "
                f"compared differ, such as {number}, which is {our!r} here and {their!r} there"
            )

    async def __call__(self, sample: Sample) -> None:
        """Set the teacher_log_probs of the sample and its branches, or fail it with the reason."""
        started = time.monotonic()
        try:
            scores = [await self._scores(sequence) for sequence in sample.sequences]
        except ScoringError as error:
            metrics.TEACHER.labels(outcome=error.reason).inc()
            failures.LOG.note("the teacher failed", str(error), index=sample.index)
            sample.fail(f"teacher: {error}")
            return
        metrics.TEACHER.labels(outcome="ok").inc()
        metrics.TEACHER_SECONDS.observe(time.monotonic() - started)
        for sequence, log_probs in zip(sample.sequences, scores, strict=True):
            sequence.teacher_log_probs = log_probs

    async def _scores(self, sequence: TokenSequence) -> Float32:
        """[response] float32, 0 where masked. Raises ScoringError."""
        trained = np.flatnonzero(sequence.loss_mask)
        log_probs = np.zeros(sequence.response_length, dtype=np.float32)
        if len(trained):
            first, end = int(trained[0]), int(trained[-1]) + 1
            tokens = sequence.tokens[: sequence.prompt_length + end].tolist()
            log_probs[first:end] = await self.log_probs(tokens, end - first)
            log_probs = np.where(sequence.loss_mask > 0, log_probs, np.float32(0))
            if not np.isfinite(log_probs).all():
                raise ScoringError("a trained token has no finite log-prob", "invalid")
        return log_probs

    async def log_probs(self, tokens: list[int], count: int) -> list[float]:
        """Of the last `count` of these tokens. Raises ScoringError."""
        if (highest := max(tokens)) >= self._words:  # a server may die of it
            raise ScoringError(
                f"token {highest} is none of the tokenizer's {self._words}: nobody can score it"
            )
        return await self._scorer.log_probs(tokens, count)


class Teachers:
    """All teachers of a job: one for each data source that has its own,
    and one for all other rows.
    """

    def __init__(self, others: Teacher, by_source: dict[str, Teacher]) -> None:
        self._others, self._by_source = others, by_source

    @property
    def url(self) -> str:
        return ", ".join(teacher.url for teacher in self._all)

    @property
    def _all(self) -> list[Teacher]:
        return [self._others, *self._by_source.values()]

    async def close(self) -> None:
        for teacher in self._all:
            await teacher.close()

    async def wait_ready(self, seconds: float) -> None:
        """Wait until each answers, and means the same tokens. TeacherError, ConfigurationError."""
        await asyncio.gather(*(teacher.wait_ready(seconds) for teacher in self._all))

    async def __call__(self, prompt: Prompt, sample: Sample) -> None:
        """Ask the one for the prompt's row; see `Teacher`."""
        await self._by_source.get(str(prompt.metadata.get("data_source")), self._others)(sample)


def teacher_of(spec: RLJobSpec, tokenizer: Any) -> Teachers | None:
    """The teachers that workers of this job ask; None where there is none, or the
    trainer has it.
    """
    distillation = spec.algorithm.distillation
    if distillation is None or distillation.teacher.url is None:
        return None
    engine, seconds = engine_of(spec), distillation.teacher.timeout_seconds

    def teacher(url: str, field: str) -> Teacher:
        url = url.rstrip("/")
        return Teacher(url, engine.scorer(url, seconds), tokenizer, field)

    by_source = {
        one.data_source: teacher(one.url, f"spec.algorithm.distillation.teachers[{number}].url")
        for number, one in enumerate(distillation.teachers)
    }
    return Teachers(teacher(distillation.teacher.url, FIELD), by_source)


def probe(words: int) -> list[int]:
    """Ids whose texts are compared: the last 256, where special tokens are, and others evenly from
    all the rest.
    """
    step = -(-words // (PROBED_TOKENS - 256))
    return sorted({*range(0, words, step), *range(max(words - 256, 0), words)})
