"""Loads quantized weights a second time, in each update.

After the first load SGLang replaces the parameters of quantized layers: matrices with a scale for
each row are transposed, and the new parameters have no loader. Loading into them fails, and
SGLang's end of an update would transpose them again. The new parameters are views of the memory of
the first ones, so updates load into these, and generation sees the new values. If they are no
views, the engine ends at its start.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..startup.precision import VARIABLE

LOADER = "sglang.srt.model_loader.loader"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_QUANTIZED = (torch.float8_e4m3fn, torch.int8)
# Module, name in it, and parameter, as the loaders of weights want it.
Loadable = list[tuple[Any, str, Any]]
_loadable: "WeakKeyDictionary[Any, Loadable]" = WeakKeyDictionary()


def register() -> None:
    if VARIABLE not in os.environ:
        return
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{LOADER}._initialize_model", remember, HookType.AFTER)
    HookRegistry.register(f"{RUNNER}.load_model", check, HookType.AFTER)
    # The first ends an update from a directory; SGLang 0.5.21 ends every update with the second.
    for name in ("load_weights_and_postprocess", "postprocess_weights"):
        if hasattr(DefaultModelLoader, name):
            HookRegistry.register(
                f"{LOADER}.DefaultModelLoader.{name}", before_processing, HookType.BEFORE
            )


def remember(model: Any, *_: Any, **__: Any) -> None:
    """Note the parameters of a new model's quantized layers, and load into these from now on."""
    _loadable[model] = [
        (module, name, parameter)
        for module in model.modules()
        if any(p.dtype in _QUANTIZED for p in module.parameters(recurse=False))
        for name, parameter in module.named_parameters(recurse=False)
    ]
    load: Callable[..., Any] = model.load_weights

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        with _with_loadable(model):
            return load(*args, **kwargs)

    model.load_weights = load_weights


@contextmanager
def _with_loadable(model: Any) -> Iterator[None]:
    """Give quantized layers the parameters that the loaders want."""
    present = [(module, name, getattr(module, name)) for module, name, _ in _loadable[model]]
    _put(_loadable[model])
    try:
        yield
    finally:
        _put(present)


def _put(parameters: Loadable) -> None:
    for module, name, parameter in parameters:
        setattr(module, name, parameter)


def before_processing(model: Any, *_: Any, **__: Any) -> None:
    """Let SGLang process what has been loaded, and not what it has processed before."""
    _put(_loadable.get(model, []))


def check(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """End the engine if it keeps quantized weights in a form that updates cannot reach."""
    for module, name, parameter in _loadable.get(runner.model, []):
        present = getattr(module, name, None)
        same = present is not None and _memory(present) == _memory(parameter)
        if not same or getattr(present, "format_ue8m0", False):
            raise RuntimeError(
                f"rollout.precision: {os.environ[VARIABLE]}: on this GPU SGLang keeps {name} of "
                f"{type(module).__name__} in another form than a checkpoint, and no new weights "
                "would reach it: choose another precision, or rollout.engineArgs: {fp8GemmBackend: "
                "triton, moeRunnerBackend: triton}"
            )


def _memory(parameter: Any) -> int:
    return int(parameter.untyped_storage().data_ptr())
