"""Passes the request for a bucket to the scheduler while it still loads the bucket before.

SGLang's HTTP process keeps a control request until the one before it is answered. Then the way of
the next request to the scheduler, and of the answer back, separate any two buckets: milliseconds
without a transfer. Here the scheduler has the next request already when it is done with one.
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
# Answers that are still to come, in order, by communicator. The scheduler answers in the order of
# the requests.
_waiting: WeakKeyDictionary[Any, Waiting] = WeakKeyDictionary()


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not is_known():
        log.warning(
            "this SGLang passes on requests for weights in an unknown way, so the plugin does not "
            "send them ahead"
        )
        return
    HookRegistry.register(f"{MANAGER}.update_weights_from_distributed", ask, HookType.AROUND)
    HookRegistry.register(f"{COMMUNICATOR}.handle_recv", answered, HookType.AROUND)


def is_known() -> bool:
    """Return True for the HTTP process of SGLang 0.5.17 to 0.5.23.

    Both hooks are needed: with only one of them no answer would come.
    """
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
    """Return True for a sluice trainer's bucket that is not the last of its update.

    The last one names the version and flushes, and SGLang treats it as usual.
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
    """Wrap SGLang's treatment of a request for a bucket. Returns (success, message)."""
    if not goes_ahead(manager, request):
        return await original(manager, request, *args, **kwargs)
    tell_once("buckets are announced to the scheduler while it loads earlier ones")
    manager.auto_create_handle_loop()
    communicator = manager.update_weights_from_distributed_communicator
    answers: list[Any] = []
    whole = asyncio.get_running_loop().create_future()
    async with communicator._queueing_lock:  # held by requests that wait for another answer
        _waiting.setdefault(communicator, deque()).append((answers, whole))
        communicator._send(request)
    await whole
    merged: tuple[bool, str] = communicator.merge_results(answers)
    return merged


def answered(original: Callable[..., None], communicator: Any, answer: Any) -> None:
    """Wrap SGLang's receipt of a scheduler's answer."""
    waiting = _waiting.get(communicator)
    if not waiting:
        original(communicator, answer)
        return
    answers, whole = waiting[0]
    answers.append(answer)
    if len(answers) == communicator._fan_out:
        waiting.popleft()
        if not whole.done():  # its client may have left
            whole.set_result(None)
