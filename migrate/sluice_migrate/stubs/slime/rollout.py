"""slime.rollout.sglang_rollout: the state of the rollout worker."""

from __future__ import annotations

import asyncio
from typing import Any


class GenerateState:
    """Tokenizer and sampling parameters of an episode, taken from its `args`.

    The semaphore is as wide as slime's; the worker limits requests.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = args.tokenizer
        self.processor = None
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
        self.sampling_params: dict[str, Any] = dict(args.sampling_params)
        self.aborted = False


def get_model_url(args: Any, model_name: str = "", endpoint: str = "/generate") -> str:
    """Return the address of the policy's engine. Raises ValueError for any other model."""
    if model_name not in ("", "default", "actor", "policy"):
        raise ValueError(
            f"get_model_url: {model_name!r}; expected the policy (default). Ask servers of other "
            "models by their own address"
        )
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"
