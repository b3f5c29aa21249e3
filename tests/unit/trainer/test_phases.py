"""Engines that pass the phases of an update concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, cast

import pytest

from sluice.engines.protocol import EngineRefusedError
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.weights import phases as module
from sluice_trainer.weights.lateness import StepTimes
from sluice_trainer.weights.phases import LEFT, PhaseRunner
from sluice_trainer.weights.transport import Peer

LATE, TIMEOUT = 0.3, 30.0


class Chained:
    """A fake transport in which each engine gets the weights through the previous one."""

    def __init__(self, order: str = "") -> None:
        self.order, self.abandoned = order, list[str]()
        self.rerouted = asyncio.Event()

    def downstream(self, name: str) -> Collection[str]:
        return self.order.partition(name)[2] if name in self.order else ""

    def is_connecting(self, name: str) -> bool:
        return False

    def abandon(self, name: str) -> None:
        self.abandoned.append(name)
        self.order = self.order.replace(name, "")
        self.rerouted.set()


async def run(
    action: Callable[[Peer], Awaitable[None]],
    *,
    transport: Chained | None = None,
    members: Collection[tuple[str, int]] | None = None,
    engines: str = "abc",
) -> dict[str, str]:
    """Run a phase and return the reason why each engine was given up, empty if it was not."""

    async def current_members() -> Collection[tuple[str, int]] | None:
        return members

    peers = [Peer(name, 1, 1, 1, cast("Any", None)) for name in engines]
    runner = PhaseRunner(
        cast("Any", transport or Chained()), current_members, StepTimes(LATE), judge=True
    )
    phase = (pb.UPDATE_PHASE_TRANSFER, action)
    ended = await asyncio.wait_for(runner.run("transfer", peers, phase, timeout=TIMEOUT), TIMEOUT)
    return {progress.peer.name: progress.failure for progress in ended}


async def test_engines_that_do_not_fail_pass() -> None:
    async def act(peer: Peer) -> None:
        await asyncio.sleep(0)

    assert await run(act) == {"a": "", "b": "", "c": ""}


async def test_an_engine_that_refuses_is_given_up_at_once() -> None:
    async def act(peer: Peer) -> None:
        if peer.name == "b":
            raise EngineRefusedError("no", answered=True)

    assert await run(act) == {"a": "", "b": "transfer: no", "c": ""}


async def test_the_only_engine_that_hangs_is_late() -> None:
    async def act(peer: Peer) -> None:
        await asyncio.sleep(TIMEOUT * (peer.name == "b"))

    reasons = await run(act)
    assert (reasons["a"], reasons["c"]) == ("", "")
    assert reasons["b"].startswith("transfer: only this engine was late: not done after 0.")


async def test_in_a_chain_the_first_that_waits_is_late_and_those_downstream_are_served() -> None:
    transport = Chained("abcd")

    async def act(peer: Peer) -> None:
        if peer.name == "b":
            await asyncio.sleep(TIMEOUT)
        if peer.name in "cd":
            await transport.rerouted.wait()

    reasons = await run(act, transport=transport, engines="abcd")
    assert [name for name, reason in reasons.items() if reason] == ["b"]
    assert transport.abandoned == ["b"]


async def test_an_engine_that_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMBERS_SECONDS", 0.01)

    async def act(peer: Peer) -> None:
        await asyncio.sleep(TIMEOUT)

    assert await run(act, engines="a", members=[("a", 2)]) == {"a": f"transfer: {LEFT}"}


async def test_an_unexpected_error_is_raised_without_waiting_for_other_engines() -> None:
    async def act(peer: Peer) -> None:
        if peer.name == "b":
            raise ZeroDivisionError
        await asyncio.sleep(TIMEOUT)

    with pytest.raises(ZeroDivisionError):
        await run(act)
