"""Ends an engine as soon as it has answered its requests, once it is told to end."""

import asyncio
import time
from typing import Any

TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
LOOK_SECONDS = 0.1
# Time without requests, after which the last answers are on their way.
REST_SECONDS = 0.5
# SGLang's interval. After it, SGLang's rules for requests that do not end apply.
PATIENCE_SECONDS = 5.0


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{TOKENIZER}.sigterm_watchdog", end_soon, HookType.AROUND)


async def end_soon(original: Any, tokenizer: Any) -> None:
    """Wrap SGLang's wait for the end.

    SGLang checks every five seconds whether it has been told to end, and then whether its requests
    have ended. This function checks more often.
    """
    while not tokenizer.gracefully_exit:
        await asyncio.sleep(LOOK_SECONDS)
    busy = time.monotonic()
    end = busy + PATIENCE_SECONDS
    while (now := time.monotonic()) < end and now - busy < REST_SECONDS:
        busy = now if tokenizer.rid_to_state else busy
        await asyncio.sleep(LOOK_SECONDS)
    await original(tokenizer)
