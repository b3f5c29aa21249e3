"""The engine's health, which decides about a failed request, a stall and a drop from the epoch.

An engine that is paused for a weight update makes no tokens and is healthy, for `pause_seconds`: by
then a trainer that died in the update has a successor, which sends the weights. An engine that has
given its memory to the trainer rests, and is healthy for as long as that takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from sluice.api.groups.rollout import EngineHealthPolicy
from sluice.engines.protocol import Client, EngineError, WeightsLostError

AGAIN_SECONDS = 0.5


class EngineLostError(EngineError):
    """The engine is dead or hung, or answers only errors: its pod must be replaced."""

    def __init__(self, message: str, *, blames: bool = True) -> None:
        super().__init__(message)
        # True if a request may have killed the engine: groups with requests there then count it as
        # their failure.
        self.blames = blames


@dataclass(slots=True)
class EngineHealth:
    """The health of one engine."""

    engine: Client
    pause_seconds: float
    policy: EngineHealthPolicy = field(default_factory=EngineHealthPolicy)
    # Why the engine is not healthy, by the last check; empty if it is.
    unhealthy: str = ""
    last_progress: float = field(default_factory=time.monotonic)
    _judgement: asyncio.Task[str] | None = None

    def progress(self) -> None:
        """Note that the engine has answered a request."""
        self.last_progress = time.monotonic()

    async def watch(self, busy: Callable[[], bool]) -> NoReturn:
        """Check the engine for ever. `busy` tells whether it has work. Raises EngineLostError."""
        failures = 0
        while True:
            await asyncio.sleep(self.policy.period_seconds)
            if busy() and time.monotonic() - self.last_progress > self.policy.stall_seconds:
                self.unhealthy = await self.examine()
                if not self.unhealthy:
                    self.progress()
            else:
                healthy, reason = await self.engine.health(self.policy.timeout_seconds)
                self.unhealthy = "" if healthy else reason
            failures = failures + 1 if self.unhealthy else 0
            if failures >= self.policy.failure_threshold:
                raise self._lost(self.unhealthy)

    async def must_live(self, error: EngineError) -> None:
        """Raise EngineLostError unless the engine is healthy, after the error of a request.

        Concurrent callers share one answer. An engine of a pool that has been started again is
        healthy, and has lost the job's adapter.
        """
        if isinstance(error, WeightsLostError):
            raise EngineLostError(f"engine {self.engine.url}: {error}", blames=False) from error
        if self._judgement is None or self._judgement.done():
            self._judgement = asyncio.create_task(self.judge())
        if reason := await asyncio.shield(self._judgement):
            raise self._lost(f"{reason}, after a request failed: {error}") from error

    async def judge(self, *, dropped: bool = False) -> str:
        """Return what `examine` does, after several attempts: a busy server may answer late."""
        for _ in range(self.policy.failure_threshold):
            self.unhealthy = await self.examine(dropped=dropped)
            if not self.unhealthy:
                break
            await asyncio.sleep(AGAIN_SECONDS)
        return self.unhealthy

    async def examine(self, *, dropped: bool = False) -> str:
        """Return why the engine makes no tokens, though it should; empty if it is healthy.

        A `dropped` engine is out of the update. Its scheduler waits for no weights then, so it
        answers also in a pause.
        """
        healthy, reason = await self.engine.health(self.policy.timeout_seconds)
        if not healthy:
            return reason
        if await self.engine.rests():
            return ""
        if paused := await self.engine.paused_seconds():
            if paused >= self.pause_seconds:
                return f"it has been paused for {paused:.0f} s, and no trainer has resumed it"
            hangs = dropped and not await self.engine.answers()
            return "it is paused, and its scheduler hangs" if hangs else ""
        healthy, reason = await self.engine.health(self.policy.generate_seconds, generate=True)
        return "" if healthy else reason

    def _lost(self, reason: str) -> EngineLostError:
        checks = self.policy.failure_threshold
        text = f"engine {self.engine.url}: {checks} health checks failed: {reason}"
        return EngineLostError(text)
