"""The judge: a reward that raises, hangs or returns nonsense fails only its sample.

Cheap built-in rewards run in the worker. Users' functions, mathematics and tested programs run in
processes with limits (`pool`). Remote rewards and reward models are called over HTTP. A row may
name another built-in reward than the job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from sluice.api import Reward, quantity_value
from sluice.rewards import registry
from sluice.rewards.judging.configuration import Configuration
from sluice.rewards.judging.pool import JudgeOutcome, Pool
from sluice.rewards.judging.reward_model import RewardModel
from sluice.rewards.types import RewardError, RewardInput, RewardValue, read_value
from sluice.rewards.voting_answers import with_answer
from sluice.runtime import error_summary
from sluice.wire.json_endpoint import JsonEndpoint

log = logging.getLogger(__name__)

REWARDS = Counter(
    "sluice_rollout_rewards",
    "Samples judged. outcome: ok, or why there is no reward: raised, timeout, died, refused, "
    "invalid, unavailable.",
    ["outcome"],
)
SECONDS = Histogram(
    "sluice_rollout_reward_seconds",
    "Time from a finished response to its reward, waiting included.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
SANDBOX = Gauge(
    "sluice_rollout_sandbox", "1: what isolates tested programs in this pod.", ["isolation"]
)
_OK = REWARDS.labels(outcome="ok")


class Judge:
    """Runs the job's reward: `await judge(samples)`.

    It returns (reward, parts) for each sample, or the RewardError that failed it.
    """

    def __init__(self, reward: Reward, *, workers: int | None = None) -> None:
        self._reward = reward
        self._size = workers or reward.sandbox.processes or _processes()
        self._function = self._new_pool(reward.function or "")
        self._builtin = self._new_pool("")
        self._remote = RemoteReward(reward.url, reward.timeout_seconds) if reward.url else None
        self._model = RewardModel(reward.model, reward.timeout_seconds) if reward.model else None

    def _new_pool(self, function: str) -> Pool:
        pooled = registry.IN_POOL.get(self._reward.type or "")
        limits = Configuration(
            function=function,
            key=self._reward.key,
            memory=int(quantity_value(str(self._reward.sandbox.memory))),
            cpu_seconds=self._reward.sandbox.cpu_seconds,
            timeout_seconds=self._reward.timeout_seconds,
            test_seconds=self._reward.sandbox.test_seconds,
            imports=pooled.imports if pooled and not function else (),
        )
        return Pool(limits, self._size)

    async def check(self) -> None:
        """Try what needs no sample, so that a job that cannot judge fails at its start.

        Raises RewardError.
        """
        if self._reward.function:
            await self._function.check()
        if self._reward.type in registry.IN_POOL:
            await self._builtin.check()
        if self._reward.type == "code":
            await _check_sandbox()
        if self._model:
            await asyncio.to_thread(self._model.load)

    async def __call__(self, samples: list[RewardInput]) -> list[JudgeOutcome]:
        started = time.monotonic()
        if self._reward.group:
            outcomes = await self._function("", samples)
        elif len(samples) == 1:
            outcomes = [await self._judge(samples[0])]
        else:
            outcomes = await asyncio.gather(*(self._judge(sample) for sample in samples))
        SECONDS.observe(time.monotonic() - started)
        _count(outcomes)
        return outcomes

    async def close(self) -> None:
        for part in (self._remote, self._model, self._function, self._builtin):
            if part:
                await part.close()

    async def _judge(self, sample: RewardInput) -> JudgeOutcome:
        try:
            return await self._outcome(sample)
        except RewardError as error:
            return error
        except Exception as error:  # an unexpected error must fail this sample only
            return RewardError(
                f"raised {error_summary.cause(error)}",
                "raised",
                error_summary.formatted_traceback(error),
            )

    async def _outcome(self, sample: RewardInput) -> JudgeOutcome:
        name, sample = registry.choose(sample, self._reward.type)
        if name in registry.IN_PROCESS:
            judgement = read_value(_run_in_process(name, sample), self._reward.key)
            return with_answer(judgement, name, sample.response)
        if name in registry.IN_POOL:  # these rewards read neither tokens nor images
            (outcome,) = await self._builtin(name, replace(sample, tokens=[], images=[]))
            if isinstance(outcome, RewardError):
                return outcome
            return with_answer(outcome, name, sample.response)
        if name == registry.REMOTE and not self._remote:
            raise RewardError(f"metadata.rm_type: {registry.REMOTE} needs reward.url")
        if self._remote:
            return read_value(await self._remote(sample), self._reward.key)
        if self._model:
            return await self._model(sample), {}
        return (await self._function("", sample))[0]


class RemoteReward(JsonEndpoint):
    """A reward behind HTTP, in slime's protocol: POST {prompt, response, label} gives it."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        super().__init__(url, timeout_seconds, RewardError)

    async def __call__(self, sample: RewardInput) -> Any:
        """Return the answer's value, not yet checked. Raises RewardError."""
        return await self.post(
            {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        )


def _count(outcomes: list[JudgeOutcome]) -> None:
    failed = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    _OK.inc(len(outcomes) - len(failed))
    for error in failed:
        REWARDS.labels(outcome=error.reason).inc()


async def _check_sandbox() -> None:
    """Log which layers confine programs on this machine, and which are missing.

    Raises RewardError if programs may not run.
    """
    from sluice.rewards.sandbox import hide, isolation

    active = await asyncio.to_thread(isolation)
    SANDBOX.labels(isolation=str(active)).set(1)
    for layer in active.missing:
        log.warning(active.warning(layer))
    if active.layers == ("seccomp",):  # then programs may inspect processes of the same user
        hide()


def _run_in_process(name: str, sample: RewardInput) -> RewardValue:
    try:
        return registry.IN_PROCESS[name](sample)
    except RewardError:
        raise
    except Exception as error:  # an unexpected row must fail its sample only
        raise RewardError(
            f"{name} raised {error_summary.cause(error)}",
            "raised",
            error_summary.formatted_traceback(error),
        ) from error


def _processes() -> int:
    """Return a quarter of the available cores, within 2 to 16.

    The engine on this machine needs some too.
    """
    return min(max(len(os.sched_getaffinity(0)) // 4, 2), 16)
