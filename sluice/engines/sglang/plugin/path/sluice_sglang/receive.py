"""Weights of a bucket are received into one buffer, from a trainer that may die meanwhile.

SGLang allocates each tensor of a bucket, copies them all into a second buffer only to know its
size, and receives there: twice the memory, and a copy of all weights while nobody generates. And
NCCL does not notice that a sender on the same machine is gone: the engine hangs until torch's
watchdog ends it after ten minutes.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from . import tell_once

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
LOOK_SECONDS = 1.0
"""How often a receiver looks whether its sender lives. Most transfers have ended before the first
time."""
GROUP_PREFIX = "sluice-"
"""Of the names that our trainers give their communicators."""
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
Named = list[tuple[str, torch.Tensor]]
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


def receive(names: Any, dtypes: Any, shapes: Any, group: Any, device: Any) -> Named:
    """Take part in the broadcast of a bucket; its tensors, as views of the one buffer."""
    tell_once("weights are received into one buffer")
    kinds = [kind if isinstance(kind, torch.dtype) else getattr(torch, kind) for kind in dtypes]
    sizes = [
        kind.itemsize * torch.Size(shape).numel() for kind, shape in zip(kinds, shapes, strict=True)
    ]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(
        data, src=0, group=group
    )  # NCCL: queued, and so is the loading that follows; gloo: waited for
    if data.is_cuda:
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        threading.Thread(target=watch, args=(arrived, group), name="sender", daemon=True).start()
    pieces = torch.split(data, sizes)
    return [
        (name, _as(*what))
        for name, what in zip(names, zip(pieces, kinds, shapes, strict=True), strict=True)
    ]


def _as(piece: torch.Tensor, kind: torch.dtype, shape: Any) -> torch.Tensor:
    aligned = piece if piece.storage_offset() % kind.itemsize == 0 else piece.clone()
    return aligned.view(kind).view(torch.Size(shape))


def watch(arrived: torch.cuda.Event, group: Any) -> None:
    """Abort the communicator if the sender dies before the broadcast ends: its process holds the
    group's store.

    NCCL alone: gloo notices by itself. Then the weights are partly the new ones, though the request
    has been answered; the engine stays paused, as it is out of the update, and the sender's
    successor brings it all weights over a communicator of its own.
    """
    store = group.get_group_store()
    while not arrived.query():  # type: ignore[no-untyped-call]
        time.sleep(LOOK_SECONDS)
        try:
            store.check(["sender"])
        except RuntimeError as error:
            log.error(
                "the trainer is gone in the middle of an update; its communicator is aborted (%s)",
                error,
            )
            group._get_backend(torch.device("cuda")).abort()
            return


def join_group(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Join a communicator with a trainer, in place of any older one: an engine has one sender at a
    time.
    """
    groups = updater._model_update_group
    older = [name for name in groups if name.startswith(GROUP_PREFIX)]
    with _without_watchdog():
        answer = original(updater, *args, **kwargs)
    for name in older:
        release(groups.pop(name))
    return answer


def release(group: Any) -> None:
    """Give up a communicator whose sender was replaced, without waiting for that sender."""
    log.info("the older communicator %s is released", group.group_name)
    dist.distributed_c10d._world.pg_group_ranks.pop(group, None)
    for table in ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag"):
        getattr(dist.distributed_c10d._world, table).pop(group, None)
    for groups in dist.distributed_c10d._world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)
    torch._C._distributed_c10d._unregister_process_group(group.group_name)
    if dist.distributed_c10d.is_nccl_available() and torch.cuda.is_available():
        backend = group._get_backend(torch.device("cuda"))
        threading.Thread(target=backend.abort, name="release", daemon=True).start()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Torch's watchdog ends the process when a collective fails: right for the engine's own groups,
    not for this one.

    The setting is read when a group is made. (The sender has the same; nothing of it is beside this
    file.)
    """
    before = os.environ.get(_ASYNC_ERRORS)
    os.environ[_ASYNC_ERRORS] = "0"
    try:
        yield
    finally:
        os.environ.pop(_ASYNC_ERRORS)
        if before is not None:
            os.environ[_ASYNC_ERRORS] = before


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
