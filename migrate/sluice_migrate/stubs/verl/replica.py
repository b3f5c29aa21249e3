"""verl.workers.rollout.replica: the output of the server manager."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class TokenOutput(BaseModel):
    """A turn of the model.

    token_ids, log_probs: [n] as sampled. stop_reason: completed, or length if the turn or the
    response reached its limit.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}
