"""A vLLM server of the user's as a teacher: log-probs of given tokens.

Uses the OpenAI completions that every vLLM serves: a request for one token, and for the log-probs
of its prompt. Those are at temperature 1 unless the server has another `--logprobs-mode`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from sluice.engines.protocol import ScoringError
from sluice.images.image import Image
from sluice.runtime.pod_env import ConfigurationError
from sluice.wire.json_endpoint import JsonEndpoint

_CONNECTIONS = 256
# Some 100 bytes a token, so no context is too long.
_LARGEST_ANSWER = 1 << 27


class Scorer:
    """A server, by its URL without a path. `seconds` limits one request."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url = url.rstrip("/")
        self._complete = JsonEndpoint(
            f"{url}/v1/completions",
            seconds,
            ScoringError,
            connections=_CONNECTIONS,
            largest_answer=_LARGEST_ANSWER,
        )
        self._detokenize = JsonEndpoint(f"{url}/detokenize", seconds, ScoringError)

    async def close(self) -> None:
        await self._complete.close()
        await self._detokenize.close()

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Raises ScoringError if the server refuses."""
        return list(await asyncio.gather(*map(self._token_text, ids)))

    async def _token_text(self, token: int) -> str:
        answer = await self._detokenize.once({"tokens": [token]})
        text = answer.get("prompt") if isinstance(answer, dict) else None
        if not isinstance(text, str):
            raise ConfigurationError(f"{self._url}/detokenize does not answer as vLLM does")
        return text

    async def log_probs(
        self, tokens: list[int], count: int, images: Sequence[Image] = ()
    ) -> list[float]:
        """Return the log-probs of the last `count` tokens at temperature 1; nan if unknown."""
        if images:
            raise ScoringError(f"{self._url} takes no images from sluice")
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        return read_answer(await self._complete.post(body), tokens[-count:])


def read_answer(answer: Any, tokens: Sequence[int]) -> list[float]:
    """Return the log-probs of these tokens, the last of the prompt. Raises ScoringError."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"][-len(tokens) :]
        values = [_value(entry, token) for entry, token in zip(entries, tokens, strict=True)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ScoringError(
            f"not an answer of vLLM's /v1/completions: {type(error).__name__} {error}",
            "invalid",
        ) from error
    return values


def _value(entry: dict[str, Any] | None, token: int) -> float:
    """Return a token's log-prob; nan for the first token of a prompt."""
    return math.nan if entry is None else float(entry[str(token)]["logprob"])
