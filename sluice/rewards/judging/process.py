"""A judging process, seen from the worker that started it (`child` is the other side)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any

from sluice.input_checks import InputError, load_json
from sluice.rewards.judging import child
from sluice.rewards.judging.configuration import Configuration
from sluice.rewards.types import RewardError
from sluice.runtime.cpu_threads import ONE_THREAD

START_SECONDS = 120.0
_LONGEST_ANSWER = 4 << 20
_READ_BYTES = 1 << 18
_END_SECONDS = 10.0


class LostError(Exception):
    """The process is gone or must be killed. The message is for people, the reason for metrics."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Process:
    """A judging process.

    `concurrent` is True if its function is a coroutine function, so that it runs all its jobs at
    the same time.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._unread = b""
        self.concurrent = False

    @classmethod
    async def start(cls, configuration: Configuration) -> Process:
        """Start a process and wait until it has loaded its function.

        Raises RewardError if it cannot.
        """
        what = configuration.function or "the judge"
        spawning = asyncio.create_task(_spawn(configuration))
        try:
            self = cls(await asyncio.shield(spawning))
        except asyncio.CancelledError:
            await cls(await spawning).kill()
            raise
        try:
            (hello,) = await self.answers(START_SECONDS)
        except TimeoutError:
            await self.kill()
            raise RewardError(
                f"{what}: was not loaded after {START_SECONDS:g} s", "unavailable"
            ) from None
        except LostError as error:
            await self.kill()
            raise RewardError(
                f"{what}: its process died while it was loaded ({error})", "unavailable"
            ) from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        if "error" in hello:
            await self.kill()
            raise RewardError(hello["error"], "unavailable")
        self.concurrent = hello["concurrent"]
        return self

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def send(self, jobs: list[child.JudgeTask]) -> None:
        self._write(child.pack(jobs))

    def drop(self) -> None:
        """Tell the process to forget jobs that it has not started; it answers {dropped: true}."""
        self._write(child.pack(child.DROP))

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(
            data
        )  # a process that is gone is noticed when its answer is awaited

    async def answers(self, seconds: float | None) -> list[dict[str, Any]]:
        """Return the next answers, at least one.

        Raises TimeoutError, or LostError if the process is gone or its answer is invalid.
        """
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds):
            while True:
                data = await self._process.stdout.read(_READ_BYTES)
                if not data:
                    raise LostError(await self._end(), "died")
                *lines, self._unread = (self._unread + data).split(b"\n")
                if lines:
                    return [_parsed(line) for line in lines]
                if len(self._unread) > _LONGEST_ANSWER:
                    raise LostError("its answer is too long", "invalid")

    async def _end(self) -> str:
        """Wait for the end and describe it."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed its output"
        if code == -signal.SIGXCPU:
            return "it used up sandbox.cpuSeconds"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def kill(self) -> None:
        """Kill the process and everything it has started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                while await self._process.stdout.read(_READ_BYTES):
                    pass  # read to the end, so that the pipe closes with its process
        await self._process.wait()


async def _spawn(configuration: Configuration) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.rewards.judging.child", configuration.text()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=ONE_THREAD | {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        limit=_READ_BYTES,
        start_new_session=True,
    )


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        answer = load_json(line, "its answer")
    except InputError:
        answer = None
    if not isinstance(answer, dict):
        raise LostError("its answer is not a JSON object", "invalid")
    return answer
