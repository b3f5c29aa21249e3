"""Adapters of functions that were written for another project, found by entry point.

The distribution `sluice-rl-migrate` provides those of slime and verl.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sluice.api import RLJobSpec

GROUP = "sluice.function_adapters"
# Projects whose functions run with this distribution, which is optional.
DISTRIBUTION = "sluice-rl-migrate"
PROJECTS = ("slime", "verl")


class FunctionAdapter(Protocol):
    """Runs the functions of one project without changes to them."""

    @property
    def play_form(self) -> str:
        """The form of the project's generate functions, for an error message."""

    def install_stubs(self) -> None:
        """Let the imports of such functions succeed if the project is not installed."""

    def reward(self, function: Callable[..., Any]) -> Callable[[Any], Any] | None:
        """Return the reward function as one of a sample; None if it is not of the project's form.

        The function that is returned also takes a list of samples if the original does.
        """

    def play(
        self, function: Callable[..., Any], spec: RLJobSpec
    ) -> Callable[[Any], Awaitable[None]] | None:
        """Return the generate function as one of an episode; None if it is not of this form."""


@cache
def installed() -> tuple[FunctionAdapter, ...]:
    """Adapters of all installed distributions, ordered by name."""
    adapters = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return tuple(entry.load() for entry in adapters)


def advice(error: Exception) -> str:
    """Name the distribution to install if it would provide the module that is missing."""
    if not isinstance(error, ModuleNotFoundError) or installed():
        return ""
    project = str(error.name).partition(".")[0]
    if project not in PROJECTS:
        return ""
    return f"; functions of {project} need {DISTRIBUTION}: pip install {DISTRIBUTION}"
