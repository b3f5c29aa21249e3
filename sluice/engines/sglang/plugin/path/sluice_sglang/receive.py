"""Weights of a bucket are received into one buffer, from a trainer that may die meanwhile.

SGLang allocates each tensor of a bucket, copies them all into a second buffer only to know its
size, and receives there: twice the memory, and a copy of all weights while nobody generates.
"""

import logging
from collections.abc import Callable
from typing import Any

from .transfer import GROUP_PREFIX, Named, receive, release, without_watchdog

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
log = logging.getLogger(__name__)


def register() -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    receivers: dict[str, Callable[..., Any]] = {
        "_receive_bucketed_weights_from_distributed": receive_bucket,
        "_update_bucketed_weights_from_distributed": update_bucket,
    }
    known = [name for name in receivers if hasattr(WeightUpdater, name)]
    if not known:
        log.warning(
            "this SGLang receives weights in a way of its own, and the plugin leaves it at that"
        )
        return
    HookRegistry.register(f"{UPDATER}.{known[0]}", receivers[known[0]], HookType.AROUND)
    HookRegistry.register(f"{UPDATER}.init_weights_update_group", join_group, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.flush_cache", flush_cache, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.handle_generate_request", in_new_cache, HookType.BEFORE)


def receive_bucket(
    original: Any, updater: Any, *, names: Any, dtypes: Any, shapes: Any, group_name: str
) -> Named:
    """In place of SGLang 0.5.21's method."""
    return receive(names, dtypes, shapes, updater._model_update_group[group_name], updater.device)


def update_bucket(
    original: Any, updater: Any, names: Any, dtypes: Any, shapes: Any, group_name: str
) -> tuple[bool, str]:
    """In place of SGLang 0.5.17's method, which loads the weights, too."""
    try:
        group = updater._model_update_group[group_name]
        updater.get_model().load_weights(receive(names, dtypes, shapes, group, updater.device))
    except Exception as error:
        message = f"Failed to update parameter online: {error}. The weights are partially updated."
        log.exception(message)
        return False, message
    return True, "Succeeded to update parameter online."


def join_group(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Join a communicator with a trainer, in place of any older one: an engine has one sender at a
    time.
    """
    groups = updater._model_update_group
    older = [name for name in groups if name.startswith(GROUP_PREFIX)]
    with without_watchdog():
        answer = original(updater, *args, **kwargs)
    for name in older:
        release(groups.pop(name))
    return answer


def flush_cache(original: Any, scheduler: Any, empty_cache: bool | None = None) -> Any:
    """Empty the prefix cache, but keep the memory that the buckets took, unless it is to be given
    to a trainer.

    An engine's prefix cache is emptied after each update. SGLang then also gives its spare memory
    back, and asks for as much in the next update: both take milliseconds in which nobody generates.
    Where requests run or wait it refuses to empty the cache. What nobody uses of it goes all the
    same, and who looks something up from then on finds nothing of the rest: the requests that wait,
    as all do after a `retract`, and all that come (`in_new_cache`), also those whose sender knows
    nothing of the update.
    """
    if not scheduler.is_fully_idle():
        scheduler.sluice_refusals = getattr(scheduler, "sluice_refusals", 0) + 1
        for request in scheduler.waiting_queue:
            in_new_cache(scheduler, request)
        drop_unused(scheduler)
    if empty_cache is None:
        empty_cache = bool(scheduler.server_args.enable_memory_saver)
    return original(scheduler, empty_cache)


def drop_unused(scheduler: Any) -> None:
    """Old entries that stay would fill the memory; SGLang then looks through all of them for each
    token's place.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    memory = scheduler.token_to_kv_pool_allocator
    memory.free_group_begin()  # or each entry's memory is given back by itself
    scheduler.tree_cache.evict(EvictParams(num_tokens=scheduler.max_total_num_tokens))
    memory.free_group_end()


def in_new_cache(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    """Entries of the prefix cache have names: a request finds those of its own name only."""
    if refusals := getattr(scheduler, "sluice_refusals", 0):
        request.extra_key = f"{request.extra_key or ''}|{refusals}"
