"""Functions of slime and verl, run by sluice without changes to them.

`SLIME` and `VERL` are the entry points, a `sluice.runtime.function_adapters.FunctionAdapter` each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sluice_migrate.functions import rewards
from sluice_migrate.stubs import import_hooks

if TYPE_CHECKING:
    from sluice.api import RLJobSpec


class _Adapter:
    def install_stubs(self) -> None:
        """Let imports of slime and verl find the stubs."""
        import_hooks.install()


class SlimeFunctions(_Adapter):
    """Reward functions and generate functions of slime."""

    play_form = "slime's `async def generate(args, sample, sampling_params)`"

    def reward(self, function: Callable[..., Any]) -> Callable[[Any], Any] | None:
        """Adapt `f(args, sample, **kwargs)`."""
        return rewards.slime_reward(function)

    def play(
        self, function: Callable[..., Any], spec: RLJobSpec
    ) -> Callable[[Any], Awaitable[None]] | None:
        """Adapt `async def generate(args, sample, sampling_params)`."""
        # Here, because processes that call reward functions import this module and need no more.
        from sluice_migrate.functions import slime_generate

        if slime_generate.is_generate(function):
            return slime_generate.Generate(function, spec)
        return None


class VerlFunctions(_Adapter):
    """Reward functions and agent loops of verl."""

    play_form = "a subclass of verl's AgentLoopBase"

    def reward(self, function: Callable[..., Any]) -> Callable[[Any], Any] | None:
        """Adapt `f(data_source, solution_str, ground_truth, extra_info=None)`."""
        return rewards.verl_reward(function)

    def play(
        self, function: Callable[..., Any], spec: RLJobSpec
    ) -> Callable[[Any], Awaitable[None]] | None:
        """Adapt a subclass of `AgentLoopBase`."""
        from sluice_migrate.functions import verl_agent_loop

        if verl_agent_loop.is_agent_loop(function):
            return verl_agent_loop.AgentLoop(function, spec)
        return None


SLIME = SlimeFunctions()
VERL = VerlFunctions()
