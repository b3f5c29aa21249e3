"""Scans a model once for each update; SGLang scans it for every bucket.

Every model's `load_weights` lists all parameters, and from 0.5.21 on SGLang asks all modules
whether something derived from their weights forbids an update. Both take milliseconds for a model
of 48 layers, while the next bucket waits. The answers do not change between buckets: SGLang demands
that the second is the same from the start on, and parameters that are not quantized are replaced,
if at all, when an update begins or ends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
CHECK = "_unsupported_derived_weight_cache_error"


class ModelScanCache:
    """Answers about models, by their ids, while an update is under way.

    A model lives as long as its engine, so no other model gets its id.
    """

    def __init__(self) -> None:
        self.update_is_under_way = False
        # Why a model may not be updated; None if it may.
        # Why a model may not be updated; None if it may.
        self.refusals: dict[int, str | None] = {}
        self.parameters: dict[int, list[tuple[str, Any]]] = {}

    def clear(self, *, update_is_under_way: bool) -> None:
        self.update_is_under_way = update_is_under_way
        self.refusals.clear()
        self.parameters.clear()


cache = ModelScanCache()


def register() -> None:
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEDULER}.pause_generation", begun, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.continue_generation", before_end, HookType.BEFORE)
    if hasattr(weight_updater.WeightUpdater, "begin_weight_update"):  # from 0.5.21 on
        HookRegistry.register(f"{UPDATER}.WeightUpdater.begin_weight_update", begun, HookType.AFTER)
        HookRegistry.register(
            f"{UPDATER}.WeightUpdater.end_weight_update", before_end, HookType.BEFORE
        )
    HookRegistry.register(
        f"{UPDATER}.WeightUpdater._update_weights_from_flattened_bucket",
        with_same_parameters,
        HookType.AROUND,
    )
    check = getattr(weight_updater, CHECK, None)
    if check and "model" in signature(check).parameters:  # from 0.5.21 on
        HookRegistry.register(f"{UPDATER}.{CHECK}", refusal, HookType.AROUND)


def begun(*_: Any, **__: Any) -> None:
    """Clear the cache after generation has paused or an update has begun."""
    cache.clear(update_is_under_way=True)


def before_end(*_: Any, **__: Any) -> None:
    """Clear the cache after the last bucket, before an update ends or generation resumes."""
    cache.clear(update_is_under_way=False)


def refusal(
    original: Callable[..., str | None], model: Any = None, *args: Any, **kwargs: Any
) -> str | None:
    """Wrap SGLang's question why a model may not be updated."""
    if not cache.update_is_under_way or model is None:
        return original(model, *args, **kwargs)
    if id(model) not in cache.refusals:
        cache.refusals[id(model)] = original(model, *args, **kwargs)
    return cache.refusals[id(model)]


def with_same_parameters(original: Callable[..., Any], updater: Any, *args: Any, **kw: Any) -> Any:
    """Wrap SGLang's loading of a bucket from the trainer's memory."""
    with same_parameters(updater):
        return original(updater, *args, **kw)


@contextmanager
def same_parameters(updater: Any) -> Iterator[None]:
    """Make the model of SGLang's WeightUpdater list the parameters of the update's first bucket."""
    if not cache.update_is_under_way or updater.model_config.quantization is not None:
        yield
        return
    model = updater.get_model()
    if id(model) not in cache.parameters:
        cache.parameters[id(model)] = list(model.named_parameters())
    parameters = cache.parameters[id(model)]

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        if args or kwargs:  # not the plain list of all parameters
            walk: Iterator[tuple[str, Any]] = type(model).named_parameters(model, *args, **kwargs)
            return walk
        return iter(parameters)

    model.named_parameters = named_parameters
    try:
        yield
    finally:
        del model.named_parameters
