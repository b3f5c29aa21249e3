"""A worker's loops end when they are cancelled, whatever comes at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_rollout import health as health_module
from sluice_rollout import worker as worker_module
from sluice_rollout.health import EngineHealth
from sluice_rollout.worker import Worker

# Between the news and the cancellation; the last are later than all that the news starts.
TURNS_OF_THE_LOOP = range(12)

Loop = Callable[[Worker], Coroutine[Any, Any, None]]


class NothingLeft:
    """A buffer all of whose prompts are leased."""

    async def lease(self, *_: Any) -> tuple[list[Any], bool]:
        return [], True


def make_worker(membership: Membership) -> Worker:
    rollout = SimpleNamespace(samples_at_once=8, samples_per_prompt=2)
    spec = SimpleNamespace(buffer=SimpleNamespace(lease_seconds=600), rollout=rollout)
    parts: list[Any] = [spec, None, None, None, NothingLeft(), membership]
    return Worker(*parts)


async def check_that_it_ends(running: asyncio.Task[None], turns: int) -> None:
    """Cancel it after so many turns of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=5)
    running.cancel()  # if the first one was swallowed
    assert done, "it went on after its cancellation"
    assert running.cancelled()


@pytest.mark.parametrize("turns", TURNS_OF_THE_LOOP)
@pytest.mark.parametrize(
    "loop",
    [Worker._heartbeats, lambda worker: worker._lease_forever(asyncio.TaskGroup())],
    ids=["heartbeats", "leasing"],
)
async def test_a_loop_ends_when_weights_come_with_its_cancellation(
    loop: Loop, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "NEWS_SECONDS", 0)
    membership = Membership("nowhere:1", pb.Member)
    membership.latest = pb.ServerMessage(admitted=True, version=0)
    running = asyncio.create_task(loop(make_worker(membership)))
    await asyncio.sleep(0.01)
    membership.latest = pb.ServerMessage(admitted=True, version=1)
    membership._wake()
    await check_that_it_ends(running, turns)


@pytest.mark.parametrize("turns", TURNS_OF_THE_LOOP)
async def test_heartbeats_end_when_one_is_asked_for_with_their_cancellation(turns: int) -> None:
    membership = Membership("nowhere:1", pb.Member)

    async def send() -> None:
        async for _ in membership._messages():
            pass

    sending = asyncio.create_task(send())
    await asyncio.sleep(0.01)
    membership.beat()
    await check_that_it_ends(sending, turns)


class Hangs:
    """An engine that never answers. `abort` would wait for it."""

    url = "http://engine"

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        return False, "/health: no answer"

    async def abort(self, rid: str | None = None) -> None:
        await asyncio.sleep(60)


async def test_groups_of_a_hanging_dropped_engine_go_back_without_waiting_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_module, "AGAIN_SECONDS", 0)
    membership = Membership("nowhere:1", pb.Member)
    membership.latest = pb.ServerMessage(dropped="transfer: only this engine was late")
    membership._wake()
    worker = make_worker(membership)
    engine: Any = Hangs()
    worker.engine = engine
    health = EngineHealth(engine, 600.0)
    worker.group_maker = cast("Any", SimpleNamespace(generator=SimpleNamespace(health=health)))
    work: Any = SimpleNamespace(
        task=asyncio.create_task(asyncio.sleep(60)), requests=SimpleNamespace(at_engine=1)
    )
    worker.leased_groups["lease"] = work
    async with asyncio.timeout(10):
        await worker._watch_membership()
        await worker._abort_requests([work])
    assert "dropped from the epoch" in str(worker.lost)
    assert work.failure == str(worker.lost), "a request may be why it hangs"
    await asyncio.wait([work.task])
    assert work.task.cancelled()
