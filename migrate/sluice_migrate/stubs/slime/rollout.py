"""slime.rollout.sglang_rollout: what a generate function asks of the worker's state."""

from __future__ import annotations

import asyncio
from typing import Any


class GenerateState:
    """The tokenizer and the sampling parameters of an episode, from the `args` that it was given.

    semaphore: open as wide as slime's; it is the worker that limits requests.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = args.tokenizer
        self.processor = None
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
        self.sampling_params: dict[str, Any] = dict(args.sampling_params)
        self.aborted = False


def get_model_url(args: Any, model_name: str = "", endpoint: str = "/generate") -> str:
    """The address of the policy's engine. ValueError for any other model: a job has one."""
    if model_name not in ("", "default", "actor", "policy"):
        raise ValueError(
            f"get_model_url: {model_name!r}; expected the policy (default): other models are "
            "servers of your own, asked by their addresses"
        )
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"
