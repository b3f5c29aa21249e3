"""A judging process of the pool: `python -m sluice.rewards.judging.child <configuration>`.

It reads pickled jobs from stdin. The argument of a job is pickled separately, so that an unreadable
argument fails only that job. It writes one line of JSON per job: a user's function runs in this
process, so its output must not be unpickled by the parent. Plain functions run one after the other
on the main thread, where alarm signals work. A coroutine function runs concurrently for all jobs at
hand.

The process leads a session, so that it is killed together with everything a function started. It
dies with the thread that started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import pickle
import resource
import select
import signal
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from sluice.input_checks import without_surrogates
from sluice.rewards import registry
from sluice.rewards.judging import configuration
from sluice.rewards.judging.configuration import Configuration
from sluice.rewards.types import RewardError, late, read_value
from sluice.runtime import error_summary, user_code

# Sent instead of jobs: forget those that have not been started.
DROP = None

# (number, name of a built-in reward or "", samples, a pickled RewardInput or list of them).
JudgeTask = tuple[int, str, int, bytes]

_PR_SET_PDEATHSIG = 1


def pack(message: list[JudgeTask] | None) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return struct.pack("<I", len(body)) + body


class _Inbox:
    """Messages from the pool."""

    def __init__(self, descriptor: int) -> None:
        self.file: BinaryIO = os.fdopen(descriptor, "rb", buffering=0)

    def waiting(self) -> bool:
        return bool(select.select([self.file], [], [], 0)[0])

    def read(self) -> list[JudgeTask] | None:
        """Return the next message. Raises EOFError once the pool is gone."""
        (size,) = struct.unpack("<I", self._exactly(4))
        return pickle.loads(self._exactly(size))  # type: ignore[no-any-return]  # noqa: S301  (our own worker's)

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.file.read(size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


class _Outbox:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, **message: Any) -> None:
        data = memoryview((json.dumps(message) + "\n").encode())
        while data:
            data = data[os.write(self._descriptor, data) :]


def _read(value: Any) -> Any:
    """Return [reward, parts] or {error, reason}, ready for JSON."""
    try:
        return read_value(value, configuration.current().key)
    except RewardError as error:
        return _failure(error)


def _failure(error: BaseException, name: str = "") -> dict[str, str]:
    if isinstance(error, RewardError):
        return {"error": str(error), "reason": error.reason}
    text = f"{name} raised {error_summary.cause(error)}{_if_memory_was_short(error)}"
    return {
        "error": without_surrogates(text),
        "reason": "raised",
        "details": without_surrogates(error_summary.formatted_traceback(error)),
    }


def _if_memory_was_short(error: BaseException) -> str:
    """Return a hint about the memory limit if the error is a MemoryError; empty otherwise.

    A process only notices that its address space is exhausted; the error does not name the limit.
    """
    if not any(isinstance(cause, MemoryError) for cause in (error, error.__cause__)):
        return ""
    size = configuration.current().memory / 2**30
    return f": a judging process may take {size:.3g} GiB (spec.reward.sandbox.memory)"


def _outcomes(value: Any, argument: Any) -> list[Any]:
    """Split the return value of a function into one outcome per sample."""
    if not isinstance(argument, list):
        return [_read(value)]
    if isinstance(value, list | tuple) and len(value) == len(argument):
        return [_read(v) for v in value]
    error = RewardError(
        f"the group reward returned {type(value).__name__}, expected a list of {len(argument)} "
        "rewards"
    )
    return [_failure(error)] * len(argument)


class _Rewards:
    def __init__(self, limits: Configuration) -> None:
        self.name, self.limits = limits.function, limits
        self.function = user_code.load_reward(self.name) if self.name else None
        for module in limits.imports:
            importlib.import_module(module)

    @property
    def concurrent(self) -> bool:
        return self.name != "" and inspect.iscoroutinefunction(user_code.load(self.name))

    def function_of(self, name: str) -> Callable[[Any], Any]:
        """Return the function of a built-in reward, or the user's function if `name` is empty."""
        return user_code.load(registry.IN_POOL[name].function) if name else self.function  # type: ignore[return-value]

    def judge(self, name: str, samples: int, body: bytes) -> list[Any]:
        """Judge one job. Every error that does not end the process becomes an outcome."""
        try:
            _limit_processor_time(self.limits.cpu_seconds)
            argument = pickle.loads(body)  # noqa: S301  (our own worker's)
            value = self.function_of(name)(argument)
            if inspect.isawaitable(value):
                value = asyncio.run(_waited(value))
            return _outcomes(value, argument)
        except BaseException as error:  # also sys.exit() of a user's function fails only its sample
            return [_failure(error, name or self.name)] * samples


async def _waited(value: Any) -> Any:
    return await value


def _one_by_one(rewards: _Rewards, inbox: _Inbox, outbox: _Outbox) -> None:
    jobs: deque[JudgeTask] = deque()
    while True:
        while not jobs or inbox.waiting():
            message = inbox.read()
            if message is DROP:
                jobs.clear()
                outbox.send(dropped=True)
            else:
                jobs.extend(message)
        number, name, samples, body = jobs.popleft()
        outbox.send(id=number, outcomes=rewards.judge(name, samples, body))


async def _all_at_once(rewards: _Rewards, inbox: _Inbox, outbox: _Outbox) -> None:
    running: set[asyncio.Task[None]] = set()

    async def judge(number: int, samples: int, body: bytes) -> None:
        try:
            argument = pickle.loads(body)  # noqa: S301  (our own worker's)
            async with asyncio.timeout(rewards.limits.timeout_seconds):
                outcomes = _outcomes(await rewards.function_of("")(argument), argument)
        except TimeoutError:
            text = f"{rewards.name}: {late(rewards.limits.timeout_seconds)}"
            outcomes = [_failure(RewardError(text, "timeout"), rewards.name)] * samples
        except Exception as error:
            outcomes = [_failure(error, rewards.name)] * samples
        outbox.send(id=number, outcomes=outcomes)

    with suppress(EOFError):
        while True:
            message = await asyncio.to_thread(inbox.read)
            for number, _, samples, body in message or []:
                task = asyncio.create_task(judge(number, samples, body))
                running.add(task)
                task.add_done_callback(running.discard)


def _limit_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _limit_processor_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds + 1, hard)
    )


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    _die_with_parent()
    inbox, outbox = _Inbox(os.dup(0)), _Outbox(os.dup(1))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)  # what a function prints goes to the log
    limits = Configuration.read(sys.argv[1])
    configuration.set_current(limits)
    _limit_memory(limits.memory)
    try:
        rewards = _Rewards(limits)
    except (user_code.LoadError, ImportError) as error:
        outbox.send(error=str(error).rstrip(": ") + _if_memory_was_short(error))
        return 1
    outbox.send(ready=True, concurrent=rewards.concurrent)
    with suppress(EOFError):
        if rewards.concurrent:
            asyncio.run(_all_at_once(rewards, inbox, outbox))
        else:
            _one_by_one(rewards, inbox, outbox)
    return 0


if __name__ == "__main__":
    sys.exit(main())
