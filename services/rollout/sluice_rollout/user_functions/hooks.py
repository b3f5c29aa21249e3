"""Hooks of the user: functions that see each finished sample before its reward, and after it.

    def shorten(prompt: Prompt, sample: Sample) -> None:      # or async
        sample.response = sample.response.rpartition("</think>")[2]

A hook changes the sample: what the reward sees of it (`response`, `metadata`), its reward, or its
loss mask, whose zeros exclude tokens from training (slime: remove_sample). A hook that raises or
hangs fails its sample.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from sluice.api.groups import rollout as api
from sluice.runtime import error_summary, user_code
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Sample, SampleError, SampleStatus
from sluice.telemetry import failure_log
from sluice_rollout import metrics
from sluice_rollout.user_functions.threads import LateError, Threads

SECONDS = 60.0
THREADS = Threads("hook")
Hook = Callable[[Prompt, Sample], Coroutine[Any, Any, None]]


async def _no_hook(prompt: Prompt, sample: Sample) -> None:
    return


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one job."""

    before_reward: Hook = _no_hook
    after_reward: Hook = _no_hook


def load_all(hooks: api.HooksSpec) -> Hooks:
    """Load the hooks of spec.rollout.hooks. Raises ConfigurationError if one cannot be loaded."""
    return Hooks(load("beforeReward", hooks.before_reward), load("afterReward", hooks.after_reward))


def load(field: str, dotted: str | None) -> Hook:
    """Load the hook of `spec.rollout.hooks.<field>`; without one, return a hook that has no effect.

    Raises ConfigurationError if it cannot be loaded.
    """
    if dotted is None:
        return _no_hook
    try:
        function = user_code.load(dotted)
    except user_code.LoadError as error:
        raise ConfigurationError(f"spec.rollout.hooks.{field}: {error}") from error

    async def run(prompt: Prompt, sample: Sample) -> None:
        if sample.status is SampleStatus.FAILED:
            return
        try:
            await THREADS.call(function, prompt, sample, seconds=SECONDS)
            _check(sample)
        except Exception as error:  # the user's function may raise anything
            metrics.HOOK_FAILURES.labels(hook=field).inc()
            is_own_error = isinstance(error, LateError | SampleError)
            reason = (
                error_summary.type_and_message(error)
                if is_own_error
                else error_summary.cause(error)
            )
            line = f"hook {dotted}: {reason}"
            failure_log.LOG.note(
                "a hook failed", line, error_summary.formatted_traceback(error), hook=field
            )
            sample.fail(line)
            sample.cut(0)  # tokens and masks may be broken
            sample.metadata, sample.response, sample.reward_parts = {}, "", {}

    return run


def _check(sample: Sample) -> None:
    """Raise SampleError if a hook has left a broken sample."""
    sample.check_tokens()
    sample.check_values()
