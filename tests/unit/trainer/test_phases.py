"""Engines side by side in the phases of an update."""

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
    """A transport in which each engine gets the weights through the one before it."""

    def __init__(self, order: str = "") -> None:
        self.order, self.abandoned = order, list[str]()
        self.served_anew = asyncio.Event()

    def downstream(self, name: str) -> Collection[str]:
        return self.order.partition(name)[2] if name in self.order else ""

    def is_connecting(self, name: str) -> bool:
        return False

    def abandon(self, name: str) -> None:
        self.abandoned.append(name)
        self.order = self.order.replace(name, "")
        self.served_anew.set()


async def run(
    action: Callable[[Peer], Awaitable[None]],
    *,
    transport: Chained | None = None,
    members: Collection[tuple[str, int]] | None = None,
    engines: str = "abc",
) -> dict[str, str]:
    """Why each engine was given up; empty: it was not."""

    async def known() -> Collection[tuple[str, int]] | None:
        return members

    peers = [Peer(name, 1, 1, 1, cast("Any", None)) for name in engines]
    runner = PhaseRunner(cast("Any", transport or Chained()), known, StepTimes(LATE), judge=True)
    part = (pb.UPDATE_PHASE_TRANSFER, action)
    ended = await asyncio.wait_for(runner.run("transfer", peers, part, timeout=TIMEOUT), TIMEOUT)
    return {progress.peer.name: progress.failure for progress in ended}


async def test_all_pass() -> None:
    async def act(peer: Peer) -> None:
        await asyncio.sleep(0)

    assert await run(act) == {"a": "", "b": "", "c": ""}


async def test_one_that_refuses_is_given_up_at_once() -> None:
    async def act(peer: Peer) -> None:
        if peer.name == "b":
            raise EngineRefusedError("no", answered=True)

    assert await run(act) == {"a": "", "b": "transfer: no", "c": ""}


async def test_one_that_hangs_alone_is_late() -> None:
    async def act(peer: Peer) -> None:
        await asyncio.sleep(TIMEOUT * (peer.name == "b"))

    reasons = await run(act)
    assert (reasons["a"], reasons["c"]) == ("", "")
    assert reasons["b"].startswith("transfer: it alone is late: not done after 0.")


async def test_in_a_chain_the_first_that_waits_is_late_and_those_behind_it_are_served() -> None:
    transport = Chained("abcd")

    async def act(peer: Peer) -> None:
        if peer.name == "b":
            await asyncio.sleep(TIMEOUT)
        if peer.name in "cd":
            await transport.served_anew.wait()

    reasons = await run(act, transport=transport, engines="abcd")
    assert [name for name, reason in reasons.items() if reason] == ["b"]
    assert transport.abandoned == ["b"]


async def test_one_whose_member_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMBERS_SECONDS", 0.01)

    async def act(peer: Peer) -> None:
        await asyncio.sleep(TIMEOUT)

    assert await run(act, engines="a", members=[("a", 2)]) == {"a": f"transfer: {LEFT}"}


async def test_a_defect_is_raised_and_nobody_is_waited_for() -> None:
    async def act(peer: Peer) -> None:
        if peer.name == "b":
            raise ZeroDivisionError
        await asyncio.sleep(TIMEOUT)

    with pytest.raises(ZeroDivisionError):
        await run(act)
