"""An SGLang server of the user's as a teacher: log-probs of given tokens.

slime's protocol: a request that generates no token and asks for the log-probs of its input. SGLang
scores given tokens at temperature 1, whatever the request says.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from sluice.engines.protocol import ScoringError
from sluice.engines.sglang.image_requests import data_url
from sluice.images.image import Image
from sluice.runtime.pod_env import ConfigurationError
from sluice.wire.json_endpoint import JsonEndpoint

_CONNECTIONS = 256
# Some 40 bytes a token, so no context is too long.
_LARGEST_ANSWER = 1 << 27


class Scorer:
    """A server, by its URL without a path. `seconds` limits one request."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url = url.rstrip("/")
        self._generate = JsonEndpoint(
            f"{url}/generate",
            seconds,
            ScoringError,
            connections=_CONNECTIONS,
            largest_answer=_LARGEST_ANSWER,
        )
        self._detokenize = JsonEndpoint(f"{url}/detokenize", seconds, ScoringError)

    async def close(self) -> None:
        await self._generate.close()
        await self._detokenize.close()

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token.

        Raises ScoringError if the server refuses, for example because it has no tokenizer.
        """
        answer = await self._detokenize.once(
            {"tokens": [[i] for i in ids], "skip_special_tokens": False}
        )
        texts = answer.get("text") if isinstance(answer, dict) else None
        if not isinstance(texts, list) or len(texts) != len(ids):
            raise ConfigurationError(f"{self._url}/detokenize does not answer as SGLang does")
        return texts

    async def log_probs(
        self, tokens: list[int], count: int, images: Sequence[Image] = ()
    ) -> list[float]:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # SGLang counts this in tokens of the expanded prompt, so it scores some more with
            # images. The last ones are read.
            "logprob_start_len": len(tokens) - count - 1,
        }
        if images:
            body["image_data"] = await asyncio.to_thread(lambda: [*map(data_url, images)])
        return read_answer(await self._generate.post(body), tokens[-count:])


def read_answer(answer: Any, tokens: Sequence[int]) -> list[float]:
    """Return the log-probs of these tokens, the last of the request; nan if unknown.

    Raises ScoringError.
    """
    try:
        entries = answer["meta_info"]["input_token_logprobs"][-len(tokens) :]
        scored = [
            (int(entry[1]), math.nan if entry[0] is None else float(entry[0])) for entry in entries
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ScoringError(
            f"not an answer of SGLang's /generate: {type(error).__name__} {error}", "invalid"
        ) from error
    # SGLang reports the last tokens of its vocabulary as 0, but scores them correctly.
    if len(scored) != len(tokens) or any(
        token_id not in (token, 0) for (token_id, _), token in zip(scored, tokens, strict=True)
    ):
        raise ScoringError(
            f"log-probs of {len(scored)} other tokens than the {len(tokens)} requested ones",
            "invalid",
        )
    return [value for _, value in scored]
