"""Adaptations of megatron-core 0.19.2 to machines without CUDA, TransformerEngine or a compiler.

Megatron hard-codes the device "cuda". `megatron_device()` makes that mean the CPU, **only inside
the `with` block and only if there is no GPU**: all calls of Megatron in this package run inside
one, and other code in the process never sees a changed torch. On a GPU machine it is a no-op.
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
    # Each of a dozen modules warns that TransformerEngine and Apex are not installed.
    warnings.simplefilter("ignore")
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.dist_checkpointing.strategies import filesystem_async


def _bring_back(output: Tensor, computed_again: Tensor) -> None:
    """Refill a storage that recomputation has emptied, below autograd, which does not notice."""
    storage, source = output.untyped_storage(), computed_again.untyped_storage()
    storage.resize_(source.size())
    storage.copy_(source)


# Megatron shares the other storage without a copy, by C++ that torch builds in the first step of
# each pod: half a minute, with ninja and a C++ compiler, which the image does not have. This
# function copies the bytes, so both copies of one layer live until its backward pass ends.
megatron_random._get_share_storage = lambda: _bring_back


# Megatron creates torch's reader and planner itself; these methods make them safe, and read from
# stores.
FileSystemReader.read_metadata = CheckpointReader.read_metadata  # type: ignore[method-assign,assignment]
FileSystemReader._slice_file = CheckpointReader._slice_file  # type: ignore[method-assign,assignment]
DefaultLoadPlanner.load_bytes = CheckpointPlanner.load_bytes  # type: ignore[method-assign,assignment]


class _Stream:
    """A no-op CUDA stream: work on the CPU is in order already."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> _Event:
        return _Event()


class _Event:
    """A no-op CUDA event that is always complete."""

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


def _no_op(*_: object, **__: object) -> None: ...


# (module, attribute, replacement). Megatron looks them all up when it calls them.
_REPLACEMENTS: tuple[tuple[Any, str, Any], ...] = (
    # Used as `device=torch.cuda.current_device()` in DDP's buffers, the optimizer, rotary
    # embeddings and checkpoints.
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    # Called around DDP's collectives and checkpoint writes.
    (torch.cuda, "synchronize", _no_op),
    (torch.cuda, "empty_cache", _no_op),
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "Event", _Event),
    (torch.cuda, "current_stream", _Stream),
    (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
    # The tracker of RNG states for model parallelism and recomputation tracks the CPU generator.
    (torch.cuda, "get_rng_state", _rng_state),
    (torch.cuda, "manual_seed", torch.manual_seed),
    (megatron_random, "_get_cuda_rng_state", _rng_state),
    (megatron_random, "_set_cuda_rng_state", _set_rng_state),
)


class _CudaMeansCpu(TorchFunctionMode):
    """Mode in which `device="cuda"` means the CPU, `.cuda()` is a no-op and memory is not pinned.

    `tensor.type()` reports a CUDA type, because Megatron's optimizers sort parameters by comparing
    it with 'torch.cuda.FloatTensor' and reject other types.
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
    """Run Megatron on `DEVICE` inside the context. Re-entrant, and usable as a decorator.

    It is a no-op on a GPU machine.
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
    """A log handler that collects messages instead of printing them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def checkpoint_writer_in_process() -> Iterator[list[str]]:
    """Write checkpoints without a helper process; yields the list of errors.

    Megatron's file writer returns results through the queue of a manager process, even for a
    synchronous save. Spawning that process imports the program again, which takes seconds and needs
    a main guard. A plain queue is enough. The writer raises only the type of an error and logs the
    rest, so the log messages are collected.
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


# Megatron warns about deprecations at every construction and save. Its version is pinned; errors
# are still shown.
logging.getLogger("megatron.core").setLevel(logging.ERROR)
