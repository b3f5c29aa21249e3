"""The engine's health, by which a failed request, a stall and a drop from the epoch are judged.

An engine that is paused for a weight update makes no tokens and is well, for `pause_seconds`: a
trainer that has died in the update has a successor by then, which brings it the weights. One that
has given its memory to the trainer rests, and is well for as long as that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from sluice.api.groups.rollout import EngineHealthPolicy
from sluice.engines.protocol import Client, EngineError

AGAIN_SECONDS = 0.5


class EngineLostError(EngineError):
    """The engine is dead or hung, or answers errors alone: its pod must be replaced.

    blames: a request may have killed it, so groups with requests there count it as their failure.
    """

    def __init__(self, message: str, *, blames: bool = True) -> None:
        super().__init__(message)
        self.blames = blames


@dataclass(slots=True)
class EngineHealth:
    """One engine's. unhealthy: why not, in words, as the last look found it; empty: it is."""

    engine: Client
    pause_seconds: float
    policy: EngineHealthPolicy = field(default_factory=EngineHealthPolicy)
    unhealthy: str = ""
    last_progress: float = field(default_factory=time.monotonic)
    _judgement: asyncio.Task[str] | None = None

    def progress(self) -> None:
        """The engine has answered a request."""
        self.last_progress = time.monotonic()

    async def watch(self, busy: Callable[[], bool]) -> NoReturn:
        """Look at the engine for ever. busy: it has work. Raises EngineLostError."""
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
        """After a request's error: raise EngineLostError unless the engine is well.

        Those who ask at the same time share one answer.
        """
        if self._judgement is None or self._judgement.done():
            self._judgement = asyncio.create_task(self.judge())
        if reason := await asyncio.shield(self._judgement):
            raise self._lost(f"{reason}, after a request failed: {error}") from error

    async def judge(self, *, dropped: bool = False) -> str:
        """`examine`, and again if it finds something: a busy server may answer late."""
        for _ in range(self.policy.failure_threshold):
            self.unhealthy = await self.examine(dropped=dropped)
            if not self.unhealthy:
                break
            await asyncio.sleep(AGAIN_SECONDS)
        return self.unhealthy

    async def examine(self, *, dropped: bool = False) -> str:
        """Why the engine makes no tokens, though it should; empty: it makes some, or need not.

        dropped: it is out of the update. Its scheduler waits for no weights then, and answers also
        in a pause.
        """
        healthy, reason = await self.engine.health(self.policy.timeout_seconds)
        if not healthy:
            return reason
        if await self.engine.rests():
            return ""
        if paused := await self.engine.paused_seconds():
            if paused >= self.pause_seconds:
                return f"it has been paused for {paused:.0f} s, and no trainer has ended that"
            return (
                ""
                if not dropped or await self.engine.answers()
                else "it is paused, and its scheduler hangs"
            )
        healthy, reason = await self.engine.health(self.policy.generate_seconds, generate=True)
        return "" if healthy else reason

    def _lost(self, reason: str) -> EngineLostError:
        checks = self.policy.failure_threshold
        text = f"engine {self.engine.url}: {checks} health checks failed: {reason}"
        return EngineLostError(text)
