"""The service over real gRPC: who is there, who is told what, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest

from sluice.wire import membership, rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from tests.integration.rendezvous_server import (
    DEADLINE,
    Rendezvous,
    engine_member,
    error_of,
    eventually,
)


def engine(rendezvous: Rendezvous, name: str = "rollout-0", attempt: int = 1) -> Membership:
    """A worker's membership: it tells what it was last told to hold."""

    def hello() -> pb.Member:
        latest = member.latest
        return engine_member(
            name, attempt=attempt, version=latest.version if latest and latest.admitted else -1
        )

    member = Membership(
        rendezvous.address, hello, lambda: pb.Heartbeat(state="idle", gauges={"leases": 3})
    )
    return member


def latest(member: Membership) -> pb.ServerMessage:
    """The rendezvous' last words to a member that has heard some."""
    assert member.latest is not None
    return member.latest


def beats(member: Membership, seconds: float) -> bool:
    """True once a member was told to send a heartbeat this often."""
    return member.latest is not None and member.latest.heartbeat_seconds == seconds


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come so seldom that no answer to one brings news in time."""
    monkeypatch.setattr("sluice_rendezvous.registry.HEARTBEATS_PER_SECOND", 0.1 / DEADLINE)


async def test_a_member_joins_and_is_known_until_it_goes(rendezvous: Rendezvous) -> None:
    async with engine(rendezvous) as member:
        await asyncio.wait_for(member.connected.wait(), DEADLINE)
        [peer] = await membership.find_members(rendezvous.address, "rollout", seconds=DEADLINE)
        assert (peer.name, peer.address) == ("rollout-0", "127.0.0.1:1")
        async with asyncio.timeout(DEADLINE):
            while (entry := (await rendezvous.ledger())["rollout-0"]).state != "idle":
                await asyncio.sleep(0.02)
        assert dict(entry.gauges) == {"leases": 3}
    async with asyncio.timeout(DEADLINE):
        while await rendezvous.ledger():
            await asyncio.sleep(0.02)


async def test_a_member_that_is_told_at_once_what_changes(
    seldom: None, rendezvous: Rendezvous
) -> None:
    async with engine(rendezvous) as member:
        await asyncio.wait_for(member.connected.wait(), DEADLINE)
        assert not latest(member).admitted
        await rendezvous.serve(0)
        await eventually(member, lambda: latest(member).admitted)
        for version in range(1, 201):
            await rendezvous.serve(version)
        await eventually(member, lambda: latest(member).version == 200)


async def test_two_tasks_that_wait_for_news_take_none_from_each_other(
    seldom: None, rendezvous: Rendezvous
) -> None:
    heard: dict[str, int] = {}

    async def listen(member: Membership, name: str, pause: float) -> None:
        seen = 0
        while True:
            seen = await member.news(seen)
            await asyncio.sleep(pause)  # busy with what it heard, while more comes
            heard[name] = latest(member).version if member.latest else -1

    async with engine(rendezvous) as member:
        await asyncio.wait_for(member.connected.wait(), DEADLINE)
        listeners = [
            asyncio.create_task(listen(member, name, pause))
            for name, pause in (("fast", 0), ("slow", 0.05))
        ]
        for version in range(50):
            await rendezvous.serve(version)
        async with asyncio.timeout(DEADLINE):
            while heard != {"fast": 49, "slow": 49}:
                await asyncio.sleep(0.01)
        for listener in listeners:
            listener.cancel()


async def test_a_dropped_engine_is_told_why_and_comes_back(
    seldom: None, rendezvous: Rendezvous
) -> None:
    async with engine(rendezvous) as member:
        await asyncio.wait_for(member.connected.wait(), DEADLINE)
        request = pb.BeginUpdateRequest(source="trainer-0", attempt=1, version=1)
        plan = await rendezvous.stub.BeginUpdate(request, metadata=rpc.metadata())
        assert not await rendezvous.report(plan.engines[0], 1, error="transfer: it hangs")
        await eventually(member, lambda: latest(member).dropped == "transfer: it hangs")
        assert not await rendezvous.report(
            plan.engines[0], 1
        )  # an answer of the old communicator comes too late
        assert not latest(member).admitted
        await rendezvous.serve(1)
        await eventually(member, lambda: latest(member).admitted and not latest(member).dropped)


async def test_after_a_restart_members_come_back_by_themselves_with_what_they_hold(
    rendezvous: Rendezvous,
) -> None:
    async with engine(rendezvous) as member:
        await asyncio.wait_for(member.connected.wait(), DEADLINE)
        await rendezvous.serve(7)
        await eventually(member, lambda: latest(member).version == 7)
        generation = (await rendezvous.ledger())["rollout-0"].generation
        await restart(rendezvous, member)
        await asyncio.wait_for(member.connected.wait(), DEADLINE)
        [peer] = await membership.find_members(rendezvous.address, "rollout", seconds=DEADLINE)
        assert (peer.name, peer.version) == ("rollout-0", 7)
        assert latest(member).admitted
        assert (await rendezvous.ledger())["rollout-0"].generation != generation


async def restart(rendezvous: Rendezvous, member: Membership) -> None:
    """Replace the service by one without members."""
    await rendezvous.stop()
    await eventually(member, lambda: not member.connected.is_set())
    await rendezvous.start()
    await asyncio.wait_for(member.connected.wait(), DEADLINE)


async def test_after_a_restart_an_older_trainer_is_refused_by_what_engines_have_heard(
    rendezvous: Rendezvous,
) -> None:
    async with engine(rendezvous) as member:
        await asyncio.wait_for(member.connected.wait(), DEADLINE)
        await rendezvous.serve(7, attempt=2)
        await eventually(member, lambda: latest(member).sources == {"trainer-0": 2})
        await restart(rendezvous, member)
        older = pb.BeginUpdateRequest(source="trainer-0", attempt=1, version=8)
        assert await error_of(rendezvous.stub.BeginUpdate(older, metadata=rpc.metadata())) == (
            grpc.StatusCode.FAILED_PRECONDITION, "trainer-0: attempt 1 was replaced by attempt 2",
        )  # fmt: skip


async def test_who_joins_is_no_news_to_others(rendezvous: Rendezvous) -> None:
    async with engine(rendezvous) as member:
        await asyncio.wait_for(member.connected.wait(), DEADLINE)
        async with asyncio.timeout(DEADLINE):
            while (await rendezvous.ledger())["rollout-0"].state != "idle":
                await asyncio.sleep(0.02)
        heard = member.news_count
        async with engine(rendezvous, "rollout-1") as other:
            await asyncio.wait_for(other.connected.wait(), DEADLINE)
            plan = await rendezvous.stub.BeginUpdate(
                pb.BeginUpdateRequest(source="trainer-0", attempt=1, version=1),
                metadata=rpc.metadata(),
            )
            assert await rendezvous.report(plan.engines[1], 1)
            await eventually(other, lambda: latest(other).admitted)
        while "rollout-1" in await rendezvous.ledger():
            await asyncio.sleep(0.02)
        assert member.news_count == heard + 1  # the first attempt of a trainer


async def test_joiners_alone_are_asked_for(rendezvous: Rendezvous) -> None:
    async with engine(rendezvous) as member, engine(rendezvous, "rollout-1") as other:
        for joiner in (member, other):
            await asyncio.wait_for(joiner.connected.wait(), DEADLINE)
        plan = await rendezvous.stub.BeginUpdate(
            pb.BeginUpdateRequest(source="trainer-0", attempt=1, version=3), metadata=rpc.metadata()
        )
        assert await rendezvous.report(plan.engines[0], 3)
        ledger = await rendezvous.stub.GetLedger(
            pb.GetLedgerRequest(joiners_to=3), metadata=rpc.metadata()
        )
        assert [entry.member.name for entry in ledger.entries] == ["rollout-1"]


async def test_members_send_heartbeats_as_often_as_they_are_told(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sluice_rendezvous.registry.HEARTBEATS_PER_SECOND", 1 / membership.HEARTBEAT_SECONDS
    )
    async with engine(rendezvous) as first:
        await eventually(first, lambda: first.latest)
        assert latest(first).heartbeat_seconds == membership.HEARTBEAT_SECONDS
        async with engine(rendezvous, "rollout-1") as second:
            for member in (first, second):  # the first hears it in answer to its next heartbeat
                await eventually(member, partial(beats, member, 4.0))
        await eventually(first, lambda: latest(first).heartbeat_seconds == 2.0)


async def test_who_is_silent_is_dropped_and_may_come_back() -> None:
    async with Rendezvous(member_timeout=1.0) as rendezvous:
        silent = asyncio.Event()

        async def messages() -> AsyncIterator[pb.MemberMessage]:
            yield pb.MemberMessage(hello=engine_member())
            await silent.wait()

        started = time.monotonic()
        answers = [
            answer
            async for answer in rendezvous.stub.Join(
                messages(), metadata=rpc.metadata(), timeout=DEADLINE
            )
        ]
        assert time.monotonic() - started > 0.9
        assert answers[0].heartbeat_seconds > 0
        assert await rendezvous.ledger() == {}
        async with engine(rendezvous) as member:
            await asyncio.wait_for(member.connected.wait(), DEADLINE)
            assert "rollout-0" in await rendezvous.ledger()


async def test_the_address_book_answers_as_soon_as_they_are_there(rendezvous: Rendezvous) -> None:
    waiting = asyncio.create_task(
        membership.find_members(rendezvous.address, "rollout", seconds=DEADLINE, at_least=2)
    )
    async with engine(rendezvous) as first:
        await asyncio.wait_for(first.connected.wait(), DEADLINE)
        assert not waiting.done()
        async with engine(rendezvous, "rollout-1"):
            assert [member.name for member in await waiting] == ["rollout-0", "rollout-1"]


async def test_who_is_missing_is_named_after_the_deadline(rendezvous: Rendezvous) -> None:
    message = r"waited 1 s for 1 member\(s\) of role buffer at the rendezvous: 0 came"
    with pytest.raises(rpc.DeadlineError, match=message):
        await membership.find_members(rendezvous.address, "buffer", seconds=1)


async def test_a_rendezvous_that_is_away_is_named_after_the_deadline(
    rendezvous: Rendezvous,
) -> None:
    await rendezvous.stop()
    with pytest.raises(
        rpc.DeadlineError, match=f"rendezvous at {rendezvous.address}: no answer for 1 s"
    ):
        await membership.find_members(rendezvous.address, "buffer", seconds=1)
    await rendezvous.start()


async def test_older_attempts_are_refused(rendezvous: Rendezvous) -> None:
    async with engine(rendezvous, attempt=2) as newer:
        await asyncio.wait_for(newer.connected.wait(), DEADLINE)
        async with engine(rendezvous, attempt=1) as older:
            await eventually(older, lambda: older.refused)
            assert (
                str(older.refused)
                == "refused by the rendezvous: rollout-0: attempt 1 was replaced by attempt 2"
            )
        assert (await rendezvous.ledger())["rollout-0"].member.attempt == 2
    await rendezvous.serve(1, attempt=3)
    for call in (
        rendezvous.stub.BeginUpdate(
            pb.BeginUpdateRequest(source="trainer-0", attempt=2, version=2), metadata=rpc.metadata()
        ),
        rendezvous.stub.ReportPhase(
            pb.PhaseReport(source="trainer-0", attempt=2), metadata=rpc.metadata()
        ),
    ):
        assert await error_of(call) == (
            grpc.StatusCode.FAILED_PRECONDITION, "trainer-0: attempt 2 was replaced by attempt 3",
        )  # fmt: skip


async def test_a_newer_attempt_takes_the_place_of_one_that_is_still_connected(
    rendezvous: Rendezvous,
) -> None:
    async with engine(rendezvous, attempt=1) as older:
        await asyncio.wait_for(older.connected.wait(), DEADLINE)
        async with engine(rendezvous, attempt=2) as newer:
            await asyncio.wait_for(newer.connected.wait(), DEADLINE)
            await eventually(older, lambda: older.refused)
            assert (await rendezvous.ledger())["rollout-0"].member.attempt == 2


async def test_every_call_needs_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rendezvous(token="right") as rendezvous:
        expected = (grpc.StatusCode.UNAUTHENTICATED, "the call does not carry this job's token")
        for metadata in ((), rpc.metadata("wrong")):
            assert (
                await error_of(rendezvous.stub.GetLedger(pb.GetLedgerRequest(), metadata=metadata))
                == expected
            )
        assert await rendezvous.ledger() == {}
        monkeypatch.setenv("SLUICE_TOKEN", "wrong")
        async with engine(rendezvous) as member:
            await eventually(member, lambda: member.refused)
            assert (
                str(member.refused)
                == "refused by the rendezvous: the call does not carry this job's token"
            )
        with pytest.raises(rpc.RefusedError, match="UNAUTHENTICATED"):
            await membership.find_members(rendezvous.address, "rollout", seconds=5)
        monkeypatch.setenv("SLUICE_TOKEN", "right")
        async with engine(rendezvous) as member:
            await asyncio.wait_for(member.connected.wait(), DEADLINE)


async def test_a_stream_that_does_not_say_hello_is_refused(rendezvous: Rendezvous) -> None:
    async def messages() -> AsyncIterator[pb.MemberMessage]:
        yield pb.MemberMessage(heartbeat=pb.Heartbeat())

    async def join() -> None:
        async for _ in rendezvous.stub.Join(messages(), metadata=rpc.metadata()):
            pass

    assert await error_of(join()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the first message must be hello",
    )
