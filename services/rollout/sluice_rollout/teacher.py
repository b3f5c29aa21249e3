"""A teacher behind an SGLang server that somebody runs: it scores each finished response, token by token.

One request for a sample (slime's protocol: nothing is generated, the log-probs of given tokens are asked for), from the
first trained token to the last. SGLang scores given tokens at temperature 1, whatever the request says; so does the
student sample, by a rule of the API. A teacher that cannot be had fails the sample, never the run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from sluice.api import RLJobSpec
from sluice.environment import ConfigurationError
from sluice.rewards import RewardError
from sluice.rewards.judging.remote import Endpoint
from sluice.sample import Prompt, Sample
from sluice.telemetry import logs
from sluice_rollout import failures, metrics

FIELD = "spec.algorithm.distillation.teacher.url"
CONNECTIONS = 256
LARGEST_ANSWER = 1 << 27
"""Some 40 bytes a token, so that no context is too long for it."""
PROBED_TOKENS = 2048
LOG_SECONDS = 30.0


class TeacherError(Exception):
    """The teacher did not answer in time. The message says what it did instead."""


class Teacher:
    """One teacher. tokenizer: the student's. field: which of the job's, for messages."""

    def __init__(self, url: str, seconds: float, tokenizer: Any, field: str = FIELD) -> None:
        """seconds: of one request."""
        self.url = url = url.rstrip("/")
        self._field = field
        self._tokenizer, self._words = tokenizer, len(tokenizer)
        self._generate = Endpoint(f"{url}/generate", seconds, connections=CONNECTIONS, largest_answer=LARGEST_ANSWER)
        self._detokenize = Endpoint(f"{url}/detokenize", seconds)

    async def close(self) -> None:
        await self._generate.close()
        await self._detokenize.close()

    async def wait_ready(self, seconds: float) -> None:
        """Wait until it answers, and see that it means the same tokens. TeacherError, ConfigurationError."""
        end, told = time.monotonic() + seconds, time.monotonic()
        ids = probe(self._words)
        while True:
            try:
                answer = await self._detokenize.once({"tokens": [[i] for i in ids], "skip_special_tokens": False})
            except RewardError as error:  # one without a tokenizer, say; log-probs may be had all the same
                logs.get().warning("whether the teacher has the student's tokens cannot be checked", error=str(error))
                return
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failure = f"{self.url} does not answer: {type(error).__name__} {error}"
            else:
                self._compare(ids, answer)
                return
            if time.monotonic() > end:
                raise TeacherError(f"{self._field}: {failure}; given up after {seconds:.0f} s")
            if time.monotonic() - told > LOG_SECONDS:
                told = time.monotonic()
                logs.get().warning("waiting for the teacher", error=failure)
            await asyncio.sleep(0.5)

    def _compare(self, ids: list[int], answer: Any) -> None:
        theirs = answer.get("text") if isinstance(answer, dict) else None
        if not isinstance(theirs, list) or len(theirs) != len(ids):
            raise ConfigurationError(f"{self._field}: {self.url}/detokenize does not answer as SGLang does")
        ours = [self._tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        others = [(i, a, b) for i, a, b in zip(ids, ours, theirs, strict=True) if a != b]
        if others:
            number, our, their = others[0]
            raise ConfigurationError(
                f"{self._field}: the teacher's tokens are not the student's: {len(others)} of {len(ids)} that were "
                f"compared differ, such as {number}, which is {our!r} here and {their!r} there"
            )

    async def __call__(self, sample: Sample) -> None:
        """Set the sample's teacher_log_probs, or fail it with the reason."""
        trained = np.flatnonzero(sample.loss_mask)
        found = np.zeros(sample.response_length, dtype=np.float32)
        started = time.monotonic()
        try:
            if len(trained):
                first, end = int(trained[0]), int(trained[-1]) + 1
                tokens = sample.tokens[: sample.prompt_length + end].tolist()
                found[first:end] = await self.log_probs(tokens, end - first)
                found = np.where(sample.loss_mask > 0, found, np.float32(0))
                if not np.isfinite(found).all():
                    raise RewardError("a trained token has no finite log-prob", "invalid")
        except RewardError as error:
            metrics.TEACHER.labels(outcome=error.reason).inc()
            failures.LOG.note("the teacher failed", str(error), index=sample.index)
            sample.fail(f"teacher: {error}")
            return
        metrics.TEACHER.labels(outcome="ok").inc()
        metrics.TEACHER_SECONDS.observe(time.monotonic() - started)
        sample.teacher_log_probs = found

    async def log_probs(self, tokens: list[int], count: int) -> list[float]:
        """Of the last `count` of these tokens. Raises RewardError."""
        if (highest := max(tokens)) >= self._words:  # SGLang dies of it
            raise RewardError(f"token {highest} is none of the tokenizer's {self._words}: nobody can score it")
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(tokens) - count - 1,
        }
        return read_answer(await self._generate.post(body), tokens[-count:])


class Teachers:
    """All teachers of a job: one for each data source that has its own, and one for all other rows."""

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
    """The teachers that workers of this job ask; None where there is none, or the trainer has it."""
    distillation = spec.algorithm.distillation
    if distillation is None or distillation.teacher.url is None:
        return None
    seconds = distillation.teacher.timeout_seconds
    by_source = {
        one.data_source: Teacher(one.url, seconds, tokenizer, f"spec.algorithm.distillation.teachers[{number}].url")
        for number, one in enumerate(distillation.teachers)
    }
    return Teachers(Teacher(distillation.teacher.url, seconds, tokenizer), by_source)


def read_answer(answer: Any, tokens: Sequence[int]) -> list[float]:
    """Log-probs of these tokens, the last that SGLang was given; nan where it has none. Raises RewardError."""
    try:
        entries = answer["meta_info"]["input_token_logprobs"][-len(tokens) :]
        found = [(int(entry[1]), math.nan if entry[0] is None else float(entry[0])) for entry in entries]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RewardError(f"not an answer of SGLang's /generate: {type(error).__name__} {error}", "invalid") from error
    # SGLang calls the last words of its vocabulary 0, and scores them as what they are.
    if len(found) != len(tokens) or any(said not in (token, 0) for (said, _), token in zip(found, tokens, strict=True)):
        raise RewardError(
            f"log-probs of {len(found)} other tokens than the {len(tokens)} that were asked for", "invalid"
        )
    return [value for _, value in found]


def probe(words: int) -> list[int]:
    """Ids whose texts are compared: the last 256, where special tokens are, and others evenly from all the rest."""
    step = -(-words // (PROBED_TOKENS - 256))
    return sorted({*range(0, words, step), *range(max(words - 256, 0), words)})
