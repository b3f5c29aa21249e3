"""A user's generate function as one that plays an episode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sluice.api import RLJobSpec
from sluice.runtime import function_adapters
from sluice_rollout.episode import Play


class SignatureError(Exception):
    """A function that cannot play an episode. The message, put after its name, says why."""


def play_of(function: Callable[..., Any], spec: RLJobSpec) -> Play:
    """Return the function as one that takes an episode.

    Adapters convert the functions of other projects; all others are sluice's.

    Raises
    ------
    SignatureError
        The function is not async, or does not take the arguments that the job gives it.

    """
    for adapter in function_adapters.installed():
        if play := adapter.play(function, spec):
            if spec.rollout.seats:
                raise SignatureError(
                    "plays one conversation, but the job has rollout.seats: expected "
                    "`async def play(episode)`, which asks the gateway for each seat by its name"
                )
            return play
    if not _is_async(function):
        forms = [adapter.play_form for adapter in function_adapters.installed()]
        expected = " or ".join(["`async def play(episode)`", *forms])
        raise SignatureError(f"is not async: expected {expected}")
    return _with_arguments(function, spec.rollout.function_args)


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return any(inspect.iscoroutinefunction(f) for f in (function, call))


def _with_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """Add rollout.functionArgs after the episode."""
    if not arguments:
        return function
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise SignatureError(
            f"does not take what spec.rollout.functionArgs has: {error}"
        ) from error
    play = functools.partial(function, **arguments)
    play.whole_group = getattr(function, "whole_group", False)  # type: ignore[attr-defined]
    return play
