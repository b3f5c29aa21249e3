"""Runs rewards. A reward that raises, hangs or returns nonsense fails its sample, never the run.

Built-in rewards are bounded and run here. A user's function runs in a process of its own with a limit on time, memory
and processor time; one that hangs is killed with its process, and the next call gets a new one (pebble does both).
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import resource
from concurrent.futures import TimeoutError as PoolTimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pebble

from sluice.api import Reward, quantity_value
from sluice.rewards import custom, registry, remote
from sluice.rewards.types import RewardError, RewardInput, read_value

Judgement = tuple[float, dict[str, float]]
_POOL_ATTEMPTS = 3


class Judge:
    """`await judge(samples)` -> for each sample (reward, parts), or the RewardError that failed it."""

    def __init__(self, reward: Reward, *, workers: int = 2) -> None:
        self._reward = reward
        self._workers = workers
        self._pool: pebble.ProcessPool | None = self._new_pool() if reward.function else None
        self._remote = remote.Remote(reward.url, reward.timeout_seconds) if reward.url else None

    def _new_pool(self) -> pebble.ProcessPool:
        return pebble.ProcessPool(
            max_workers=self._workers,
            context=multiprocessing.get_context("spawn"),
            initializer=_limit_process,
            initargs=(int(quantity_value(str(self._reward.sandbox.memory))),),
        )

    async def check(self) -> None:
        """Load the user's function once, so that a wrong path fails the job at its start. Raises RewardError."""
        if self._reward.function:
            await self._in_pool(_load_only, self._reward.function, timeout=60.0)

    async def __call__(self, samples: list[RewardInput]) -> list[Judgement | RewardError]:
        if self._reward.group:
            return await self._judge_group(samples)
        return list(await asyncio.gather(*(self._judge(sample) for sample in samples)))

    async def close(self) -> None:
        if self._remote:
            await self._remote.close()
        if self._pool:
            self._pool.stop()
            await asyncio.to_thread(self._pool.join)

    async def _judge(self, sample: RewardInput) -> Judgement | RewardError:
        try:
            return read_value(await self._value(sample), self._reward.key)
        except RewardError as error:
            return error

    async def _value(self, sample: RewardInput) -> Any:
        name = sample.metadata.get("rm_type") or self._reward.type
        if name:
            function = registry.lookup(str(name))
            try:
                return function(sample)
            except Exception as error:  # a label of the wrong kind fails its sample alone
                raise RewardError(f"reward {name} raised {type(error).__name__}: {error}") from error
        if self._remote:
            return await self._remote(sample)
        return await self._call(sample)

    async def _judge_group(self, samples: list[RewardInput]) -> list[Judgement | RewardError]:
        try:
            values = await self._call(samples)
            if not isinstance(values, list | tuple) or len(values) != len(samples):
                raise RewardError(f"the group reward returned {values!r}, expected a list of {len(samples)} rewards")
        except RewardError as error:
            return [error] * len(samples)
        return [self._read(value) for value in values]

    def _read(self, value: Any) -> Judgement | RewardError:
        try:
            return read_value(value, self._reward.key)
        except RewardError as error:
            return error

    async def _call(self, argument: RewardInput | list[RewardInput]) -> Any:
        function = self._reward.function or ""
        cpu_seconds = self._reward.sandbox.cpu_seconds
        return await self._in_pool(_run, function, argument, cpu_seconds, timeout=self._reward.timeout_seconds)

    async def _in_pool(self, function: Any, *arguments: Any, timeout: float) -> Any:
        """Run in the pool. A pool whose processes were all killed from outside is replaced, and the call repeated."""
        for _ in range(_POOL_ATTEMPTS):
            pool = self._living_pool()
            try:
                return await asyncio.wrap_future(pool.schedule(function, args=arguments, timeout=timeout))
            except BrokenProcessPool:
                pool.stop()
            except PoolTimeoutError as error:
                raise RewardError(f"{self._reward.function}: no reward after {timeout:g} s") from error
            except pebble.ProcessExpired as error:
                raise RewardError(f"{self._reward.function}: its process died ({error})") from error
            except custom.LoadError as error:
                raise RewardError(str(error)) from error
            except Exception as error:  # whatever the user's function raised, on the far side of a process
                raise RewardError(f"{self._reward.function} raised {type(error).__name__}: {error}") from error
        raise RewardError(f"{self._reward.function}: its processes were killed {_POOL_ATTEMPTS} times")

    def _living_pool(self) -> pebble.ProcessPool:
        if self._pool is None:
            raise RewardError("no reward function is set")
        if not self._pool.active:
            self._pool = self._new_pool()
        return self._pool


def _limit_process(memory: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _load_only(dotted: str) -> None:
    custom.load(dotted)


def _run(dotted: str, argument: Any, cpu_seconds: int) -> Any:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + cpu_seconds + 1, hard))
    result = custom.load(dotted)(argument)
    return asyncio.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(awaitable: Any) -> Any:
    return await awaitable
