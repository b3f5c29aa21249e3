"""The request for a bucket goes on to the scheduler while it still loads the bucket before.

SGLang's HTTP process keeps a control request until the one before it is answered. Then the next
bucket's way to the scheduler, and the answer's way back, lie between any two buckets: milliseconds
in which nothing is received. Here the scheduler finds the next request when it comes back for it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from .. import tell_once
from .transfer import GROUP_PREFIX

MANAGER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
COMMUNICATOR = "sglang.srt.managers.communicator.FanOutCommunicator"
Waiting = deque[tuple[list[Any], "asyncio.Future[None]"]]
log = logging.getLogger(__name__)
_waiting: WeakKeyDictionary[Any, Waiting] = WeakKeyDictionary()
"""Answers to requests that are on their way, in their order, by the communicator. The scheduler
answers in the order in which it is asked."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not is_known():
        log.warning(
            "this SGLang passes requests for weights on in a way of its own, one after the other, "
            "and the plugin leaves it at that"
        )
        return
    HookRegistry.register(f"{MANAGER}.update_weights_from_distributed", ask, HookType.AROUND)
    HookRegistry.register(f"{COMMUNICATOR}.handle_recv", answered, HookType.AROUND)


def is_known() -> bool:
    """True for SGLang's way of 0.5.17 to 0.5.23: both hooks are needed, or no answer would come."""
    try:
        from sglang.srt.managers.communicator import FanOutCommunicator
        from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
    except ImportError:
        return False
    communicator = FanOutCommunicator(lambda _: None, 1)
    parts = ("_queueing_lock", "_send", "_fan_out", "handle_recv", "merge_results")
    return all(hasattr(communicator, part) for part in parts) and hasattr(
        TokenizerControlMixin, "update_weights_from_distributed"
    )


def goes_ahead(manager: Any, request: Any) -> bool:
    """True for a bucket of ours that is not the last: that one names the version and flushes, and
    SGLang treats it as it treats any.
    """
    last = request.weight_version is not None or request.flush_cache
    return manager.is_pause and request.group_name.startswith(GROUP_PREFIX) and not last


async def ask(
    original: Callable[..., Awaitable[tuple[bool, str]]],
    manager: Any,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[bool, str]:
    """Around SGLang's treatment of a request for a bucket. Answers (success, message)."""
    if not goes_ahead(manager, request):
        return await original(manager, request, *args, **kwargs)
    tell_once("buckets are announced to the scheduler while it loads earlier ones")
    manager.auto_create_handle_loop()
    communicator = manager.update_weights_from_distributed_communicator
    answers: list[Any] = []
    whole = asyncio.get_running_loop().create_future()
    async with communicator._queueing_lock:  # whoever holds it waits for an answer of its own
        _waiting.setdefault(communicator, deque()).append((answers, whole))
        communicator._send(request)
    await whole
    merged: tuple[bool, str] = communicator.merge_results(answers)
    return merged


def answered(original: Callable[..., None], communicator: Any, answer: Any) -> None:
    """Around SGLang's receipt of a scheduler's answer."""
    waiting = _waiting.get(communicator)
    if not waiting:
        original(communicator, answer)
        return
    answers, whole = waiting[0]
    answers.append(answer)
    if len(answers) == communicator._fan_out:
        waiting.popleft()
        if not whole.done():  # its client may have gone
            whole.set_result(None)
