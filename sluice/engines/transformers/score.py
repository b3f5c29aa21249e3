"""A server of the user's as a teacher: log-probs of given tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from sluice.engines.protocol import ScoringError
from sluice.images.image import Image
from sluice.wire.json_endpoint import JsonEndpoint

_CONNECTIONS = 256


class Scorer:
    """A server, by its URL without a path. `seconds` limits one request."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url = url.rstrip("/")
        self._score = JsonEndpoint(
            f"{url}/log_probs", seconds, ScoringError, connections=_CONNECTIONS
        )
        self._decode = JsonEndpoint(f"{url}/decode", seconds, ScoringError)

    async def close(self) -> None:
        await self._score.close()
        await self._decode.close()

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Raises ScoringError if the server refuses."""
        answers = await asyncio.gather(*(self._decode.once({"tokens": [token]}) for token in ids))
        return [str(answer["text"]) for answer in answers]

    async def log_probs(
        self, tokens: list[int], count: int, images: Sequence[Image] = ()
    ) -> list[float]:
        """Return the log-probs of the last `count` tokens at temperature 1; nan if unknown."""
        if images:
            raise ScoringError(f"{self._url} takes no images from sluice")
        following = min(count, len(tokens) - 1)  # nothing precedes the first token
        if not following:
            return [math.nan] * count
        answer = await self._score.post({"tokens": tokens, "count": following})
        try:
            values = [float(value) for value in answer["log_probs"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ScoringError(
                f"not an answer of sluice's engine transformers: {type(error).__name__} {error}",
                "invalid",
            ) from error
        return [math.nan] * (count - following) + values
