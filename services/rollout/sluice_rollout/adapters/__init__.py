"""Generate functions of sluice's, slime's and verl's kind, as one that plays an episode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sluice.api import RLJobSpec
from sluice_rollout.adapters import slime, verl
from sluice_rollout.episode import Play


class AdapterError(Exception):
    """A function that cannot be played. The message, behind its name, says what was expected."""


def play_of(function: Callable[..., Any], spec: RLJobSpec) -> Play:
    """The function as one of an episode, by what it is: a class of verl's agent loops, a function
    with slime's parameters, or sluice's own. Raises AdapterError.
    """
    is_slime = not verl.is_agent_loop(function) and slime.is_generate(function)
    if spec.rollout.seats and (is_slime or verl.is_agent_loop(function)):
        raise AdapterError(
            "plays one conversation, but the job has rollout.seats: expected "
            "`async def play(episode)`, which asks the gateway for each seat by its name"
        )
    if verl.is_agent_loop(function):
        return verl.AgentLoop(function, spec)
    if not _is_async(function):
        raise AdapterError(
            "is not async: expected `async def play(episode)`, slime's "
            "`async def generate(args, sample, sampling_params)` or a subclass of verl's "
            "AgentLoopBase"
        )
    if is_slime:
        return slime.Generate(function, spec)
    return _with_arguments(function, spec.rollout.function_args)


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return any(inspect.iscoroutinefunction(f) for f in (function, call))


def _with_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """The function, with rollout.functionArgs behind the episode. Raises AdapterError."""
    if not arguments:
        return function
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise AdapterError(f"does not take what spec.rollout.functionArgs has: {error}") from error
    play = functools.partial(function, **arguments)
    play.whole_group = getattr(function, "whole_group", False)  # type: ignore[attr-defined]
    return play
