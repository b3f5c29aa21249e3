"""Adaptations that run megatron-core 0.19.2 without CUDA, without TransformerEngine, without a C++
compiler, and with checkpoints that come from elsewhere.

Megatron names the device "cuda" outright. `megatron_device()` makes that mean the CPU, **only
inside the `with` block and only where there is no GPU**: everything that this package does with
Megatron happens inside one, and nobody else in the process ever sees a changed torch. On a GPU
machine it does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.overrides import TorchFunctionMode

from sluice_trainer.checkpoint.checkpoint_reader import CheckpointPlanner, CheckpointReader
from sluice_trainer.distributed.device import DEVICE

with warnings.catch_warnings():
    # Each of a dozen modules warns that TransformerEngine and Apex are not installed. We know.
    warnings.simplefilter("ignore")
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.dist_checkpointing.strategies import filesystem_async


def _bring_back(output: Tensor, computed_again: Tensor) -> None:
    """Fill a storage that recomputation has emptied, below autograd, which does not notice."""
    storage, source = output.untyped_storage(), computed_again.untyped_storage()
    storage.resize_(source.size())
    storage.copy_(source)


# Megatron's own takes the other storage without a copy, by C++ that torch builds in the first step
# of each pod: half a minute, with ninja and a C++ compiler, of which our image has neither. Here
# the bytes are copied, and both copies of one layer's live until its backward pass has ended.
megatron_random._get_share_storage = lambda: _bring_back


# Megatron reads checkpoints with torch's reader and planner, which it makes itself.
FileSystemReader.read_metadata = CheckpointReader.read_metadata  # type: ignore[method-assign,assignment]
DefaultLoadPlanner.load_bytes = CheckpointPlanner.load_bytes  # type: ignore[method-assign,assignment]


class _Stream:
    """Stands in for a CUDA stream: work on the CPU is already in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> _Event:
        return _Event()


class _Event:
    """Stands in for a CUDA event: always complete."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _rng_state(*_: object, **__: object) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


def _nothing(*_: object, **__: object) -> None: ...


# (module, attribute, replacement). Megatron looks all of these up at call time.
_REPLACEMENTS: tuple[tuple[Any, str, Any], ...] = (
    # `device=torch.cuda.current_device()` in DDP's buffers, the optimizer, rotary embeddings,
    # checkpoints.
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    # Called around DDP's collectives and checkpoint writes.
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "empty_cache", _nothing),
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "Event", _Event),
    (torch.cuda, "current_stream", _Stream),
    (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
    # The tracker of RNG states for model parallelism and recompute: here it tracks the CPU
    # generator.
    (torch.cuda, "get_rng_state", _rng_state),
    (torch.cuda, "manual_seed", torch.manual_seed),
    (megatron_random, "_get_cuda_rng_state", _rng_state),
    (megatron_random, "_set_cuda_rng_state", _set_rng_state),
)


class _CudaMeansCpu(TorchFunctionMode):
    """Inside this mode `device="cuda"` means the CPU, `.cuda()` is the identity and memory is never
    pinned.

    `tensor.type()` reports a CUDA type, because Megatron's optimizers sort parameters by comparing
    it with 'torch.cuda.FloatTensor' and refuse everything else.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _is_cuda(device: object) -> bool:
    return (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and device.startswith("cuda")
    )


_active = False


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Megatron runs on `DEVICE` inside. Also a decorator; re-entrant; does nothing on a GPU
    machine.
    """
    global _active
    if _active or DEVICE.type == "cuda":
        yield
        return
    with contextlib.ExitStack() as restore:
        for module, name, replacement in _REPLACEMENTS:
            restore.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, replacement)
        restore.enter_context(_CudaMeansCpu())
        _active = True
        try:
            yield
        finally:
            _active = False


class _Messages(logging.Handler):
    """Collects what is logged instead of printing it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def checkpoint_writer_in_process() -> Iterator[list[str]]:
    """Write checkpoints without a helper process. Yields the list of what went wrong.

    Megatron's file writer hands its results over through the queue of a manager *process*, also for
    a synchronous save. Spawning it imports the program anew (seconds, and it needs a main guard). A
    plain queue does. And of an error it raises only the type; what happened goes to its log, from
    where it is picked up here.
    """
    log, messages = filesystem_async.logger, _Messages()
    queue_before, propagate_before = filesystem_async._results_queue, log.propagate
    filesystem_async._results_queue, log.propagate = queue.Queue(), False
    log.addHandler(messages)
    try:
        yield messages.texts
    finally:
        log.removeHandler(messages)
        filesystem_async._results_queue, log.propagate = queue_before, propagate_before


# Megatron warns at every construction and save of what is deprecated. The version is pinned; errors
# still show.
logging.getLogger("megatron.core").setLevel(logging.ERROR)
