"""An engine that is told to end does so as soon as it has nothing left to do."""

import asyncio
import time
from typing import Any

TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
LOOK_SECONDS = 0.1
REST_SECONDS = 0.5
"""Without requests: the last answers are then on their way."""
PATIENCE_SECONDS = 5.0
"""SGLang's own step: after it, its own rules for requests that do not end hold."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{TOKENIZER}.sigterm_watchdog", end_soon, HookType.AROUND)


async def end_soon(original: Any, tokenizer: Any) -> None:
    """SGLang looks every five seconds whether it has been told to end, and then whether its
    requests have ended.
    """
    while not tokenizer.gracefully_exit:
        await asyncio.sleep(LOOK_SECONDS)
    told = busy = time.monotonic()
    while (now := time.monotonic()) - told < PATIENCE_SECONDS and now - busy < REST_SECONDS:
        busy = now if tokenizer.rid_to_state else busy
        await asyncio.sleep(LOOK_SECONDS)
    await original(tokenizer)
