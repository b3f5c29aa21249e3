"""The engines of an update side by side: each goes through the phases by itself, and is given up by
itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.engines.protocol import EngineRefusedError
from sluice.telemetry import tracing
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.weights.lateness import StepTimes
from sluice_trainer.weights.transport import FAILURES, Peer, Transport

LOOK_SECONDS = 0.1
# Between two looks at who is still a member: the rendezvous drops a silent one after five
# heartbeats of 2 s.
MEMBERS_SECONDS = 2.0
LEFT = "its member has left the rendezvous"
Members = Callable[[], Awaitable["Collection[tuple[str, int]] | None"]]
"""Name and attempt of each engine that the rendezvous knows; None: that is not known now."""
PhaseAction = tuple[pb.UpdatePhase, Callable[[Peer], Awaitable[None]]]
"""A phase, and what it does at one engine."""


@dataclass(slots=True, eq=False)
class EngineProgress:
    """One engine on its way through some phases.

    phase: the one that it is in, or failed in. failure: why it is given up; empty: it is not.
    refused: True if the engine itself answered that it does not take what was sent.
    """

    peer: Peer
    phase: pb.UpdatePhase
    task: asyncio.Task[None] | None = None
    failure: str = ""
    refused: bool = False
    since: float = field(default_factory=time.monotonic)
    seconds: float | None = None

    @property
    def waits(self) -> bool:
        """True until the engine has passed all phases, or is given up."""
        return self.seconds is None and not self.failure

    def fail(self, reason: str, *, refused: bool = False) -> None:
        self.failure = f"{phase_name(self.phase)}: {reason}"
        self.refused = refused


class PhaseRunner:
    """Runs phases at all engines of an update, and gives up who fails, is late or has left."""

    def __init__(
        self, transport: Transport, members: Members, step_times: StepTimes, *, judge: bool
    ) -> None:
        """Judge: engines that are late against others are given up, not at the deadline only."""
        self._transport = transport
        self._members = members
        self.step_times = step_times
        self._judge = judge

    async def run(
        self,
        step: str,
        peers: Sequence[Peer],
        *parts: PhaseAction,
        timeout: float,
        connects: bool = False,
    ) -> list[EngineProgress]:
        """Run phases at each engine, one after the other, beside the other engines.

        Parameters
        ----------
        step
            Name by which the engines' times are compared.
        peers
            The engines.
        parts
            The phases, in their order.
        timeout
            Deadline of a phase, in seconds.
        connects
            True if the step may make communicators, which takes longer.

        Returns
        -------
        What became of each engine.

        """
        engines = [EngineProgress(peer, parts[0][0]) for peer in peers]
        for progress in engines:
            progress.task = asyncio.create_task(self._pass(step, progress, parts, timeout))
        waiting = {progress.task for progress in engines if progress.task is not None}
        looking: asyncio.Future[Collection[tuple[str, int]] | None] | None = None
        next_look = time.monotonic() + MEMBERS_SECONDS
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=LOOK_SECONDS)
                for ended in done:
                    ended.result()  # raises what is no engine's failure
                if waiting and self._judge:
                    self._give_up_late(step, engines, connects=connects)
                if looking is None and time.monotonic() >= next_look:
                    looking = asyncio.ensure_future(self._members())
                elif looking is not None and looking.done():
                    self._give_up_gone(engines, looking.result())
                    looking, next_look = None, time.monotonic() + MEMBERS_SECONDS
                waiting = {
                    progress.task
                    for progress in engines
                    if progress.task in waiting and progress.waits
                }
        finally:
            for task in [*(progress.task for progress in engines), looking]:
                if task and not task.done():
                    task.cancel()
        return engines

    async def _pass(
        self, step: str, progress: EngineProgress, parts: Sequence[PhaseAction], seconds: float
    ) -> None:
        try:
            for phase, action in parts:
                progress.phase = phase
                with tracing.span(phase_name(phase), engine=progress.peer.name):
                    async with asyncio.timeout(seconds):
                        await action(progress.peer)
            progress.seconds = time.monotonic() - progress.since
            self.step_times.passed(step, progress.peer.name, progress.seconds)
        except* FAILURES as failures:
            error = _first(failures)
            refused = isinstance(error, EngineRefusedError) and error.answered
            progress.fail(str(error) or f"not done after {seconds:g} s", refused=refused)
            self._transport.abandon(progress.peer.name)  # now: others may take until the deadline

    def _give_up_late(
        self, step: str, engines: Sequence[EngineProgress], *, connects: bool
    ) -> None:
        waiting = [progress for progress in engines if progress.waits]
        held_up = {
            name for progress in waiting for name in self._transport.downstream(progress.peer.name)
        }
        suspects = [progress for progress in waiting if progress.peer.name not in held_up]
        names = [progress.peer.name for progress in suspects]
        passed = {
            progress.peer.name: progress.seconds
            for progress in engines
            if progress.seconds is not None
        }
        now = time.monotonic()
        for progress in suspects:
            name = progress.peer.name
            connecting = connects and self._transport.is_connecting(name)
            limit = self.step_times.limit(step, name, passed, names, connecting=connecting)
            if limit is not None and now - progress.since > limit:
                took = f"{max(passed.values()):.3g} s" if passed else "less in their last update"
                self._give_up(
                    progress,
                    engines,
                    f"it alone is late: not done after {now - progress.since:.1f} s, the others "
                    f"took {took}",
                )

    def _give_up_gone(
        self, engines: Sequence[EngineProgress], members: Collection[tuple[str, int]] | None
    ) -> None:
        if members is None:
            return
        for progress in engines:
            if progress.waits and (progress.peer.name, progress.peer.attempt) not in members:
                self._give_up(progress, engines, LEFT)

    def _give_up(
        self, progress: EngineProgress, engines: Sequence[EngineProgress], reason: str
    ) -> None:
        progress.fail(reason)
        if progress.task:
            progress.task.cancel()
        held_up = set(self._transport.downstream(progress.peer.name))
        self._transport.abandon(progress.peer.name)
        # Engines behind it get the weights in another route now, and have time for that.
        for other in engines:
            if other.peer.name in held_up:
                other.since = time.monotonic()


def phase_name(phase: pb.UpdatePhase) -> str:
    """Return prepare, pause, transfer, verify or resume."""
    return str(pb.UpdatePhase.Name(phase)).removeprefix("UPDATE_PHASE_").lower()


def _first(failures: BaseExceptionGroup[Any]) -> BaseException:
    """One of what went wrong side by side."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
