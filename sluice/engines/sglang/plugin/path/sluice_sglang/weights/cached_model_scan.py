"""One look through a whole model in an update, where SGLang looks through it for every bucket.

Every model's `load_weights` lists all parameters, and from 0.5.21 on SGLang asks all modules
whether something derived from their weights forbids an update. Both walk through the model,
milliseconds each where it has 48 layers, while the next bucket waits. Neither answer changes from
one bucket to the next: SGLang demands of the second that it is the same from the start on, and
parameters that are not quantized are replaced, if at all, when an update begins or ends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
CHECK = "_unsupported_derived_weight_cache_error"


class ModelScanCache:
    """Answers about models, by their ids, while an update is under way; else nothing is kept.

    A model lives as long as its engine: no other one gets its id.
    """

    def __init__(self) -> None:
        self.update_is_under_way = False
        self.refusals: dict[int, str | None] = {}
        """A reason against updating a model. None: there is none."""
        self.parameters: dict[int, list[tuple[str, Any]]] = {}

    def forget(self, *, update_is_under_way: bool) -> None:
        self.update_is_under_way = update_is_under_way
        self.refusals.clear()
        self.parameters.clear()


known = ModelScanCache()


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
    """After generation has paused, or an update has begun, and before the first bucket."""
    known.forget(update_is_under_way=True)


def before_end(*_: Any, **__: Any) -> None:
    """After the last bucket, before an update ends or generation goes on."""
    known.forget(update_is_under_way=False)


def refusal(
    original: Callable[..., str | None], model: Any = None, *args: Any, **kwargs: Any
) -> str | None:
    """Around SGLang's question why a model may not be updated."""
    if not known.update_is_under_way or model is None:
        return original(model, *args, **kwargs)
    if id(model) not in known.refusals:
        known.refusals[id(model)] = original(model, *args, **kwargs)
    return known.refusals[id(model)]


def with_same_parameters(original: Callable[..., Any], updater: Any, *args: Any, **kw: Any) -> Any:
    """Around SGLang's loading of a bucket out of the trainer's memory."""
    with same_parameters(updater):
        return original(updater, *args, **kw)


@contextmanager
def same_parameters(updater: Any) -> Iterator[None]:
    """Inside, the model of SGLang's WeightUpdater lists the parameters that it had for the first
    bucket of the update.
    """
    if not known.update_is_under_way or updater.model_config.quantization is not None:
        yield
        return
    model = updater.get_model()
    if id(model) not in known.parameters:
        known.parameters[id(model)] = list(model.named_parameters())
    parameters = known.parameters[id(model)]

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        if args or kwargs:  # another question
            walk: Iterator[tuple[str, Any]] = type(model).named_parameters(model, *args, **kwargs)
            return walk
        return iter(parameters)

    model.named_parameters = named_parameters
    try:
        yield
    finally:
        del model.named_parameters
