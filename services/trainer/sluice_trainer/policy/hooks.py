"""Functions of the user that every rank of the trainer calls (`trainer.hooks`).

    def freeze_routers(context: HookContext) -> None:
        for module in context.modules:
            for name, parameter in module.named_parameters():
                if ".router." in name:
                    parameter.requires_grad_(False)

A hook changes what its context holds, and returns nothing. A hook that raises, or takes longer than
`trainer.hooks.timeoutSeconds`, ends the trainer, which restarts from its last checkpoint.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from sluice.api import RLJobSpec
from sluice.runtime import error_summary, user_code
from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry import logs

ModelName: TypeAlias = Literal["policy", "reference", "teacher"]


@dataclass(frozen=True, slots=True)
class HookContext:
    """What a hook gets.

    Attributes
    ----------
    spec
        Spec of the job.
    rank, world_size
        This rank, and the number of ranks.
    step
        The training step in progress, from 1; 0 before the first one.
    optimizer_step
        The optimizer step in progress of this training step, from 0.
    model
        The model that is about to compute.
    modules
        The modules of this rank: FSDP2's model, or Megatron's chunks. Empty in `init`.
    optimizer
        The policy's optimizer; None in `init`.

    """

    spec: RLJobSpec
    rank: int
    world_size: int
    step: int = 0
    optimizer_step: int = 0
    model: ModelName = "policy"
    modules: Sequence[nn.Module] = ()
    optimizer: Any = None


class HookError(Exception):
    """A hook raised. The message names its field, the function and the cause."""


Hook: TypeAlias = Callable[[HookContext], None]


def _no_hook(context: HookContext) -> None:
    return


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """The hooks of one job."""

    init: Hook = _no_hook
    before_log_probs: Hook = _no_hook
    before_train_step: Hook = _no_hook

    @classmethod
    def load(cls, spec: RLJobSpec) -> TrainerHooks:
        """Load `trainer.hooks`. Raises ConfigurationError if one cannot be called."""
        hooks = spec.trainer.hooks
        names = {
            "init": hooks.init,
            "beforeLogProbs": hooks.before_log_probs,
            "beforeTrainStep": hooks.before_train_step,
        }
        return cls(*(_load(field, name, hooks.timeout_seconds) for field, name in names.items()))


def _load(field: str, dotted: str | None, seconds: float) -> Hook:
    if dotted is None:
        return _no_hook
    where = f"spec.trainer.hooks.{field}"
    try:
        function = user_code.load(dotted)
    except user_code.LoadError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{where}: {dotted} is async: expected `def hook(context)`")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigurationError(
            f"{where}: {dotted} does not take one argument, the context ({error}): expected `def "
            "hook(context)`"
        ) from error
    where = f"{where}: {dotted}"

    def run(context: HookContext) -> None:
        with _limit(where, seconds):
            try:
                result = function(context)
            except Exception as error:  # the user's function may raise anything
                raise HookError(f"{where} raised {error_summary.cause(error)}") from error
        if result is not None:
            raise ConfigurationError(
                f"{where} returned {type(result).__name__}: expected nothing, because a hook "
                "changes what its context holds"
            )

    return run


@contextmanager
def _limit(where: str, seconds: float) -> Iterator[None]:
    """End the process if the block takes longer: nothing else stops code that hangs."""
    timer = threading.Timer(seconds, _end, (where, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(where: str, seconds: float) -> None:
    faulthandler.dump_traceback(all_threads=True)
    logs.print_error(
        f"{where} did not return within {seconds:g} s (trainer.hooks.timeoutSeconds); the lines "
        "above show where it is"
    )
    os._exit(1)
