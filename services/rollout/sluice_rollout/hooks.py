"""A user's hooks: functions that see each finished sample before its reward, and after it.

    def shorten(prompt: Prompt, sample: Sample) -> None:      # or async
        sample.response = sample.response.rpartition("</think>")[2]

A hook changes the sample: what the reward sees of it (`response`, `metadata`), its reward, or with a loss mask of zeros
that nothing of it is trained on (slime: remove_sample). A hook that raises or hangs fails its sample.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sluice.api import training as api
from sluice.environment import ConfigurationError
from sluice.rewards import custom
from sluice.sample import Prompt, Sample, SampleStatus
from sluice.telemetry import logs
from sluice_rollout import metrics

SECONDS = 60.0
Hook = Callable[[Prompt, Sample], Awaitable[None]]


async def _nothing(prompt: Prompt, sample: Sample) -> None:
    return


@dataclass(frozen=True, slots=True)
class Hooks:
    """Those of one job."""

    before_reward: Hook = _nothing
    after_reward: Hook = _nothing


def load_all(hooks: api.Hooks) -> Hooks:
    """The hooks of spec.rollout.hooks. ConfigurationError: one cannot be loaded."""
    return Hooks(load("beforeReward", hooks.before_reward), load("afterReward", hooks.after_reward))


def load(field: str, dotted: str | None) -> Hook:
    """The hook of `spec.rollout.hooks.<field>`; one that does nothing where there is none. ConfigurationError."""
    if dotted is None:
        return _nothing
    try:
        function = custom.load(dotted)
    except custom.LoadError as error:
        raise ConfigurationError(f"spec.rollout.hooks.{field}: {error}") from error

    async def run(prompt: Prompt, sample: Sample) -> None:
        if sample.status is SampleStatus.FAILED:
            return
        try:
            async with asyncio.timeout(SECONDS):
                await _call(function, prompt, sample)
            sample.check_tokens()
            json.dumps(sample.metadata)
        except Exception as error:  # the user's function may raise anything
            metrics.HOOK_FAILURES.labels(hook=field).inc()
            text = (
                f"no end after {SECONDS:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            )
            logs.get().warning("a hook failed", hook=field, function=dotted, error=text)
            sample.fail(f"hook {dotted}: {text}"[:2000])
            sample.cut(0)  # whatever it did to tokens and masks
            sample.metadata = {}

    return run


async def _call(function: Callable[..., Any], prompt: Prompt, sample: Sample) -> None:
    """In a thread, where it is not async: a slow one must not hold up the worker."""
    if inspect.iscoroutinefunction(function):
        await function(prompt, sample)
    else:
        await asyncio.to_thread(function, prompt, sample)
