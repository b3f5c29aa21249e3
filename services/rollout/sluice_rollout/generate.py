"""One sample: from a prompt's tokens, or from a partial response, to a finished response."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sluice.api import EvaluationSampling, Sampling
from sluice.sample import Sample, SampleStatus
from sluice_rollout.engine import Engine, EngineError, PromptRefusedError

_PAUSE_AFTER_ABORT_SECONDS = 0.2


@dataclass(slots=True)
class Generator:
    """Generates samples at one engine, `concurrency` requests at a time.

    `draining` set: no request is sent any more, and what is unfinished stays `aborted`, to be continued elsewhere.
    """

    engine: Engine
    decode: Callable[[list[int]], str]
    slots: asyncio.Semaphore
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, prompt_ids: list[int], sample: Sample, sampling: dict[str, Any]) -> Sample:
        """Generate until the sample is finished, or aborted by a drain. The sample is changed and returned.

        An abort that is not ours comes from a weight update that ends running requests: go on from the tokens that
        are there, under the new weights.
        """
        if not len(sample.tokens):
            sample.append_prompt(prompt_ids)
        while not sample.status.finished:
            left = sampling["max_new_tokens"] - sample.response_length
            if left <= 0:
                sample.status = SampleStatus.TRUNCATED
            elif self.draining.is_set():
                sample.status = SampleStatus.ABORTED
                break
            else:
                await self._request(sample, sampling | {"max_new_tokens": left})
        if sample.status.finished and sample.status != SampleStatus.FAILED:
            sample.response = self._text(sample)
        return sample

    async def _request(self, sample: Sample, sampling: dict[str, Any]) -> None:
        async with self.slots:
            if self.draining.is_set():
                return
            try:
                made = await self.engine.generate(uuid.uuid4().hex, sample.tokens.tolist(), sampling)
            except PromptRefusedError as error:
                sample.fail(str(error))
                return
            except EngineError:
                if not self.draining.is_set():
                    raise
                return  # the pod ends, and its engine was the first: what the sample had before goes back
        sample.append(made.tokens, made.log_probs, made.spans)
        if made.finish == "stop":
            sample.status = SampleStatus.COMPLETED
            if made.matched_stop:
                sample.metadata["matched_stop"] = made.matched_stop
        elif made.finish == "length":
            sample.status = SampleStatus.TRUNCATED
        elif not made.tokens:
            await asyncio.sleep(_PAUSE_AFTER_ABORT_SECONDS)

    def _text(self, sample: Sample) -> str:
        text = self.decode(sample.tokens[sample.prompt_length :].tolist())
        return text.removesuffix(sample.metadata.get("matched_stop", ""))


def sampling_params(sampling: Sampling, override: EvaluationSampling | None = None) -> dict[str, Any]:
    """SGLang's sampling parameters."""
    chosen = sampling.model_dump(exclude={"stop", "max_response_tokens"})
    length = sampling.max_response_tokens
    if override is not None:
        chosen |= override.model_dump(exclude_none=True, exclude={"max_response_tokens"})
        length = override.max_response_tokens or length
    return chosen | {"max_new_tokens": length, "stop": sampling.stop or None, "skip_special_tokens": True}
