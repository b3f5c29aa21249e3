"""Dynamic filters of the user.

The built-in filters run in the buffer, which runs no user code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sluice.runtime import error_summary, user_code
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import SampleGroup
from sluice_rollout.user_functions.threads import LateError, Threads

BUILT_IN = ("nonzero_std",)
SECONDS = 60.0
THREADS = Threads("filter")
Filter = Callable[[SampleGroup], Awaitable[str | None]]


class FilterError(Exception):
    """The user's filter raised, or took too long."""


async def _keep_all(group: SampleGroup) -> str | None:
    return None


def load(name: str | None) -> Filter:
    """Load a filter by its path.

    The filter returns None to keep a group, or a text to drop it, which is the reason in metrics. A
    function that returns True or False keeps or drops, as slime's filters do. The filter raises
    FilterError.

    Raises
    ------
    ConfigurationError
        If it cannot be loaded.

    """
    if name is None or name in BUILT_IN:
        return _keep_all
    try:
        function = user_code.load(name)
    except user_code.LoadError as error:
        raise ConfigurationError(f"spec.rollout.dynamicFilter: {error}") from error

    async def apply(group: SampleGroup) -> str | None:
        try:
            verdict = await THREADS.call(function, group, seconds=SECONDS)
        except LateError as error:
            raise FilterError(
                f"rollout.dynamicFilter {name}: no answer after {SECONDS:g} s"
            ) from error
        except Exception as error:  # the user's function may raise anything
            raise FilterError(
                f"rollout.dynamicFilter {name} raised {error_summary.cause(error)}"
            ) from error
        if isinstance(verdict, bool):
            return None if verdict else function.__name__
        return verdict if verdict is None else str(verdict)

    return apply
