"""Dynamic filters of the user's own. The built-in ones run in the buffer, where no user code may run."""

from __future__ import annotations

from collections.abc import Callable

from sluice.environment import ConfigurationError
from sluice.rewards import custom
from sluice.sample import SampleGroup

BUILT_IN = ("nonzero_std",)
Filter = Callable[[SampleGroup], str | None]


def load(name: str | None) -> Filter:
    """The filter by its dotted path: None keeps a group, a text drops it and is the reason in the metrics.

    A function that returns True or False keeps or drops, as slime's filters do.
    """
    if name is None or name in BUILT_IN:
        return lambda _: None
    try:
        function = custom.load(name)
    except custom.LoadError as error:
        raise ConfigurationError(f"spec.rollout.dynamicFilter: {error}") from error

    def apply(group: SampleGroup) -> str | None:
        verdict = function(group)
        if isinstance(verdict, bool):
            return None if verdict else function.__name__
        return verdict if verdict is None else str(verdict)

    return apply
