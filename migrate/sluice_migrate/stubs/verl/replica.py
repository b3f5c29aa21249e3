"""verl.workers.rollout.replica: what the server manager answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class TokenOutput(BaseModel):
    """A turn of the model. token_ids, log_probs: [n] as sampled. stop_reason: completed, or length
    where the turn or the response was full.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}
