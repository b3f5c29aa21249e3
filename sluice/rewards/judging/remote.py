"""A reward behind HTTP, in slime's protocol: POST {prompt, response, label};
the JSON answer is the reward.
"""

from __future__ import annotations

from typing import Any

from sluice.rewards.types import RewardError, RewardInput
from sluice.wire.json_endpoint import JsonEndpoint


class Remote(JsonEndpoint):
    """A URL that answers a sample with its reward."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        super().__init__(url, timeout_seconds, RewardError)

    async def __call__(self, sample: RewardInput) -> Any:
        """Return the answer's value, not yet checked. Raises RewardError."""
        return await self.post(
            {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        )
