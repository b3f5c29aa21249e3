"""Receives the weights of a bucket into one buffer, while the bucket before is loaded.

The sender, a trainer or another engine, may die meanwhile. Each bucket is passed on to the next
engine. SGLang allocates each tensor of a bucket, copies all of them into a second buffer only to
know its size, and receives there: twice the memory, and a copy of all weights while generation is
paused.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..pool_credential import job_of, tag_of
from .cached_model_scan import same_parameters
from .relay import LINK_PREFIX, Link, Links, Route, route
from .transfer import (
    GROUP_PREFIX,
    Named,
    look_after,
    memory,
    release,
    unpack,
    without_watchdog,
)

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# Path of the HTTP server that says that this engine passes weights on.
PASSES_ON = "/sluice_passes_on"
log = logging.getLogger(__name__)
# Route of the bucket that is being received, by the name of its communicator.
_routes: dict[str, Route] = {}


class Buffers:
    """The two buffers for buckets of one rank: one is received while the other is loaded.

    Buckets are received on a separate CUDA stream. It waits until the bucket before the last one
    has been loaded, and loading waits for what is received, so no process waits for the GPU. On a
    CPU one happens after the other.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        # The bucket that was received last, which may still be loaded.
        self._latest: torch.Tensor | None = None
        # The bucket before it, and the event behind the work that loads it.
        self._before: tuple[torch.Tensor, Any] | None = None

    @contextmanager
    def receiving(self, device: Any) -> Iterator[None]:
        """Receive a bucket with the work queued inside. Work queued later waits for it."""
        if torch.device(device).type != "cuda":
            yield
            return
        loading = torch.cuda.current_stream(device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if self._before is not None:
            self._stream.wait_event(self._before[1])  # then its memory may be reused
        self._before = None
        if self._latest is not None:
            self._before = (self._latest, loading.record_event())
        with torch.cuda.stream(self._stream):
            yield
        loading.wait_stream(self._stream)

    def keep(self, data: torch.Tensor) -> None:
        """Keep the memory of a bucket that is being received until it has been loaded."""
        self._latest = data if data.is_cuda else None

    def release(self) -> None:
        """Free both buffers once they have been loaded."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._latest = self._before = None


links = Links()
buffers = Buffers()


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = updater_hooks()
    if not hooks:
        log.warning(
            "this SGLang receives weights in an unknown way, so the plugin does not change that"
        )
        return
    for name, hook in hooks.items():
        HookRegistry.register(f"{UPDATER}.{name}", hook, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.flush_cache", flush_cache, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.handle_generate_request", in_new_cache, HookType.BEFORE)


def updater_hooks() -> dict[str, Callable[..., Any]]:
    """Return hooks around the methods of SGLang's WeightUpdater; empty if it is not supported."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    join = {"init_weights_update_group": join_group}
    if hasattr(WeightUpdater, "_receive_bucketed_weights_from_distributed"):  # 0.5.21
        return join | {
            "receive_weights_from_distributed": along_route,
            "_receive_bucketed_weights_from_distributed": receive_bucket,
            "load_weights_from_distributed": load_whole,
        }
    if hasattr(WeightUpdater, "_update_bucketed_weights_from_distributed"):  # 0.5.17
        return join | {
            "update_weights_from_distributed": update_along_route,
            "_update_bucketed_weights_from_distributed": update_bucket,
        }
    return {}


def along_route(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang 0.5.21's handling of a request for a bucket, before it looks up a communicator.

    A sluice trainer may put a route in place of the communicator's name.
    """
    call = inspect.signature(original).bind(updater, *args, **kwargs)
    way = route(call.arguments["group_name"])
    call.arguments["group_name"] = way.source
    _routes.clear()
    _routes[way.source] = way
    return original(*call.args, **call.kwargs)


def update_along_route(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang 0.5.17's method in the same way. An exception would end the engine."""
    try:
        return along_route(original, updater, *args, **kwargs)
    except AssertionError as error:  # a communicator that another one has replaced
        return False, str(error)


def receive_bucket(
    original: Any, updater: Any, *, names: Any, dtypes: Any, shapes: Any, group_name: str
) -> Named:
    """Replace SGLang 0.5.21's method."""
    way = _routes.pop(group_name, Route(group_name))
    data = receive_data(updater, way, lambda: memory(dtypes, shapes, updater.device))
    return unpack(data, names, dtypes, shapes)


def receive_data(updater: Any, way: Route, make_room: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Receive the bytes of a bucket into the memory that `make_room` returns."""
    source = updater._model_update_group[way.source]
    links.make_room()
    with buffers.receiving(updater.device):
        data = make_room()
        buffers.keep(data)
        links.begin(source, data, way)
        if not isinstance(source, Link):
            look_after(source, data)
    return data


def load_whole(original: Any, updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Load a bucket as SGLang 0.5.21 does, while it may still be coming.

    If it has not come whole, the trainer is told so and sends it again: the engine has loaded what
    was in the memory.
    """
    with same_parameters(updater):
        success, message = original(updater, *args, **kwargs)
    failure = failed_link()
    return (False, failure) if failure else (success, message)


def failed_link() -> str:
    """Return why the bucket that is being loaded has not come to every rank; empty if it has."""
    came_over_link = links.comes_over_link
    failure = links.failure()
    return failure_on_any_rank(failure) if came_over_link else failure


def failure_on_any_rank(failure: str) -> str:
    """Return this rank's failure, or say that another rank has one. All ranks must call it."""
    if (ranks := engine_ranks()) is not None:
        whole = torch.tensor([0 if failure else 1])
        torch.distributed.all_reduce(whole, torch.distributed.ReduceOp.MIN, group=ranks)
        if not whole.item():
            return failure or "the weights have not come to another rank of this engine"
    return failure


def engine_ranks() -> Any:
    """Return the CPU group of this engine's ranks; None if there is one rank."""
    from sglang.srt.distributed import get_tp_group

    ranks = get_tp_group()
    return ranks.cpu_group if ranks.world_size > 1 else None


def update_bucket(
    original: Any, updater: Any, names: Any, dtypes: Any, shapes: Any, group_name: str
) -> tuple[bool, str]:
    """Replace SGLang 0.5.17's method, which also loads the weights."""
    try:
        bucket = receive_bucket(
            None, updater, names=names, dtypes=dtypes, shapes=shapes, group_name=group_name
        )
        with same_parameters(updater):
            updater.get_model().load_weights(bucket)
    except Exception as error:
        message = f"Failed to update parameter online: {error}. The weights are partially updated."
        log.exception(message)
        return False, message
    failure = failed_link()
    return (False, failure) if failure else (True, "Succeeded to update parameter online.")


def join_group(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Join a communicator with a trainer or another engine, in place of any older one.

    An engine has one sender at a time, and sends to one engine. A link is made in the background,
    as a generating engine must not wait for another one; the trainer waits for the link.
    """
    bound = inspect.signature(original).bind(updater, *args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    groups, name = updater._model_update_group, call["group_name"]
    older = [group for group in groups if is_trainers(group) and owner(group) == owner(name)]
    if not name.startswith(LINK_PREFIX):
        with without_watchdog():
            answer = original(updater, *args, **kwargs)
        give_up(groups, older)
        return answer
    if call["rank_offset"] == 0:
        pass_on_over(call, updater.tp_rank)
    else:
        give_up(groups, older)
        groups[name] = link(call, call["rank_offset"] + updater.tp_rank)
    return True, "The link is being made."


def is_trainers(group: str) -> bool:
    """Return True if a communicator or link brings a trainer's weights."""
    return group.startswith(GROUP_PREFIX)


def owner(group: str) -> str:
    """Return the name of the job whose trainer this is; empty if the engine has one job."""
    return job_of(tag_of(group.removeprefix(GROUP_PREFIX)))


def give_up(groups: dict[str, Any], names: list[str]) -> None:
    """Give up communicators and links over which weights came."""
    for name in names:
        sender = groups.pop(name)
        if isinstance(sender, Link):
            sender.give_up("another one takes its place")
        else:
            release(sender)


def link(call: dict[str, Any], rank: int) -> Link:
    return Link(
        call["group_name"],
        call["master_address"],
        call["master_port"],
        rank,
        call["world_size"],
        call["backend"],
    )


def pass_on_over(call: dict[str, Any], rank: int) -> None:
    """Use a new link to the next engine. Every rank has all of a bucket, and rank 0 sends it."""
    if links.onward:
        links.onward.give_up("another one takes its place")
    links.onward = link(call, 0) if rank == 0 else None


def flush_cache(original: Any, scheduler: Any, empty_cache: bool | None = None) -> Any:
    """Empty the prefix cache, but keep the buckets' memory unless it is released for a trainer.

    An engine's prefix cache is emptied after each update. SGLang then also frees its spare memory,
    and allocates as much in the next update: both take milliseconds without generation. If requests
    run or wait, SGLang refuses to empty the cache. Its unused entries are dropped all the same, and
    later lookups do not find the rest: neither those of requests that wait, as all do after a
    `retract`, nor those of new ones (`in_new_cache`), even if their sender does not know of the
    update.
    """
    buffers.release()
    if not scheduler.is_fully_idle():
        scheduler.sluice_refusals = getattr(scheduler, "sluice_refusals", 0) + 1
        for request in scheduler.waiting_queue:
            in_new_cache(scheduler, request)
        drop_unused(scheduler)
    if empty_cache is None:
        empty_cache = bool(scheduler.server_args.enable_memory_saver)
    return original(scheduler, empty_cache)


def drop_unused(scheduler: Any) -> None:
    """Drop unused entries of the prefix cache.

    Old entries would fill the memory, and SGLang would search all of them for each token's place.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    memory = scheduler.token_to_kv_pool_allocator
    memory.free_group_begin()  # frees the memory of all entries at once
    scheduler.tree_cache.evict(EvictParams(num_tokens=scheduler.max_total_num_tokens))
    memory.free_group_end()


def in_new_cache(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    """Rename the request's cache. A request finds only cache entries of the same name."""
    if refusals := getattr(scheduler, "sluice_refusals", 0):
        request.extra_key = f"{request.extra_key or ''}|{refusals}"
