"""Run the phases of an update on all engines concurrently.

Each engine passes through the phases independently, and is given up independently.
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
# Seconds between two queries of the members. The rendezvous drops a silent member after five
# heartbeats of 2 s.
MEMBERS_SECONDS = 2.0
LEFT = "it has left the rendezvous"
# Returns name and attempt of each engine that the rendezvous knows, or None if that is unknown now.
Members = Callable[[], Awaitable["Collection[tuple[str, int]] | None"]]
# A phase, and what it does on one engine.
PhaseAction = tuple[pb.UpdatePhase, Callable[[Peer], Awaitable[None]]]


@dataclass(slots=True, eq=False)
class EngineProgress:
    """Progress of one engine through some phases.

    Attributes
    ----------
    peer
        The engine.
    phase
        The current phase, or the one that failed.
    task
        The task that runs the phases.
    failure
        Reason why the engine is given up; empty if it is not.
    refused
        True if the engine itself answered that it does not accept what was sent.
    since
        Monotonic time from which its lateness counts.
    seconds
        Duration of all phases once they are done; None until then.

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
        """True until the engine has passed all phases or is given up."""
        return self.seconds is None and not self.failure

    def fail(self, reason: str, *, refused: bool = False) -> None:
        self.failure = f"{phase_name(self.phase)}: {reason}"
        self.refused = refused


class PhaseRunner:
    """Runs phases on the engines of an update; gives up those that fail, are late or have left."""

    def __init__(
        self, transport: Transport, members: Members, step_times: StepTimes, *, judge: bool
    ) -> None:
        """Create a runner.

        Parameters
        ----------
        transport
            Transport of the update, which is told about engines that are given up.
        members
            Query of the engines that the rendezvous knows.
        step_times
            Measured seconds of each engine and step, by which lateness is judged.
        judge
            Give up an engine that is late compared with the others; otherwise only the deadline
            counts.

        """
        self._transport = transport
        self._members = members
        self.step_times = step_times
        self._judge = judge

    async def run(
        self,
        step: str,
        peers: Sequence[Peer],
        *phases: PhaseAction,
        timeout: float,
        connects: bool = False,
    ) -> list[EngineProgress]:
        """Run phases on each engine, in order, concurrently for all engines.

        Parameters
        ----------
        step
            Name under which the engines' times are compared.
        peers
            The engines.
        phases
            The phases, in order.
        timeout
            Deadline of each phase, in seconds.
        connects
            True if the step may create communicators, which takes longer.

        Returns
        -------
        The progress of each engine.

        """
        engines = [EngineProgress(peer, phases[0][0]) for peer in peers]
        for progress in engines:
            progress.task = asyncio.create_task(self._pass(step, progress, phases, timeout))
        waiting = {progress.task for progress in engines if progress.task is not None}
        looking: asyncio.Future[Collection[tuple[str, int]] | None] | None = None
        next_look = time.monotonic() + MEMBERS_SECONDS
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=LOOK_SECONDS)
                for ended in done:
                    ended.result()  # raises errors that are not an engine's failure
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
        self, step: str, progress: EngineProgress, phases: Sequence[PhaseAction], seconds: float
    ) -> None:
        try:
            for phase, action in phases:
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
            # At once: other engines may need the whole deadline.
            self._transport.abandon(progress.peer.name)

    def _give_up_late(
        self, step: str, engines: Sequence[EngineProgress], *, connects: bool
    ) -> None:
        waiting = [progress for progress in engines if progress.waits]
        held_up = {
            name for progress in waiting for name in self._transport.downstream(progress.peer.name)
        }
        # An engine that waits for an upstream engine is not late itself.
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
                    "only this engine was late: not done after "
                    f"{now - progress.since:.1f} s, the others took {took}",
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
        # Ask before `abandon` removes the engine from the routes.
        held_up = set(self._transport.downstream(progress.peer.name))
        self._transport.abandon(progress.peer.name)
        # Downstream engines now get the weights over another route, and get more time for it.
        for other in engines:
            if other.peer.name in held_up:
                other.since = time.monotonic()


def phase_name(phase: pb.UpdatePhase) -> str:
    """Return prepare, pause, transfer, verify or resume."""
    return str(pb.UpdatePhase.Name(phase)).removeprefix("UPDATE_PHASE_").lower()


def _first(failures: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first leaf of a group of concurrent failures."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
