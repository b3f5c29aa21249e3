"""Engines that relay weights: three real ones, over gloo (NCCL on GPUs)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.sglang.control import BUCKET_HEADER, Control
from sluice.engines.sglang.layout import Layout
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.chain import Chain
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.sender import WeightSender
from tests.cases import quick
from tests.integration.engines import Sglang, backend, gpus
from tests.integration.rendezvous_server import Rendezvous
from tests.integration.weights.conftest import PATIENCE, TIMEOUT
from tests.integration.weights.test_stacked_experts import cores
from tests.integration.weights.tools import (
    BUCKET,
    begin,
    on_device,
    publish,
    send,
    serves,
    serving,
    set_deadline,
)

MakeSender = Callable[..., WeightSender]
JoinEngine = Callable[..., Any]
pytestmark = pytest.mark.skipif(
    0 < gpus() < 4, reason="NCCL makes no link between engines that share a GPU"
)
# Bytes of a piece: a bucket has several pieces.
PIECE = 30_000
# Seconds that the trainer's side of a communicator waits for an engine that is gone. Longer than
# these tests, because a process that exits while torch gives up a group aborts.
LONG = 300.0
NAMES = ["rollout-0", "rollout-1", "rollout-2"]


@pytest.fixture(scope="module")
def other_engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sglang]]:
    directory = tmp_path_factory.mktemp("others")
    own_gpu = [{"CUDA_VISIBLE_DEVICES": str(n)} if gpus() else {} for n in (1, 2)]
    servers = [Sglang(model, directory / f"log-{n}", **own_gpu[n - 1]) for n in (1, 2)]
    try:
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            if server.process.poll() is None:  # a test kills one of them
                server.kill()


@pytest.fixture
async def engines(
    sglang: Sglang, other_engines: list[Sglang], join_engine: JoinEngine
) -> list[Sglang]:
    """Three running engines with the weights of `model`, in the order of their chain."""
    for other in other_engines:
        other.reset()
    servers = [sglang, *other_engines]
    for name, server in zip(NAMES, servers, strict=True):
        await join_engine(name, server.address)
    return servers


def chain(timeout: float = PATIENCE, attempt: int = 1) -> Chain:
    direct = Collective(backend(), "127.0.0.1", timeout, f"trainer-0-{attempt}")
    return Chain(direct, lambda _: PIECE)


def hurry(sender: WeightSender, transport: Chain, seconds: float = 2 * TIMEOUT) -> None:
    """Shorten the deadline of the next phases."""
    transport._link_timeout = seconds / 2
    set_deadline(sender, seconds)


async def all_serve(engines: list[Sglang], weights: Path, version: int) -> bool:
    return all([await serves(engine.url, weights, version) for engine in engines])


async def test_each_engine_relays_the_weights_to_the_next(
    engines: list[Sglang],
    make_sender: MakeSender,
    rendezvous: Rendezvous,
    model: Path,
    other_model: Path,
) -> None:
    transport = chain()
    sender = make_sender(transport)
    update = await publish(sender, 1, other_model)
    assert (list(update.engines), update.failed) == (NAMES, {})
    assert (list(update.relayed), update.rerouted) == (NAMES[1:], {})
    assert update.in_turn == 1
    assert await all_serve(engines, other_model, 1)
    links = dict(transport._links)
    assert [*transport._direct.communicators] == NAMES[:1]
    update = await publish(sender, 2, model)
    assert (list(update.relayed), update.rerouted) == (NAMES[1:], {})
    assert transport._links == links
    assert await all_serve(engines, model, 2)
    assert {e.member.version for e in (await rendezvous.ledger()).values()} == {2}


async def test_a_bucket_whose_request_is_held_up_is_not_taken_for_the_next_one(
    engines: list[Sglang],
    make_sender: MakeSender,
    other_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request for a bucket is sent while the previous bucket is still arriving."""
    original_call = Control.call

    async def late(
        control: Control, method: str, path: str, body: Any = None, headers: Any = None, *rest: Any
    ) -> Any:
        turn = (headers or {}).get(BUCKET_HEADER, "")
        if turn.startswith("sluice-link-") and turn.endswith("/1"):
            await asyncio.sleep(0.5)
        return await original_call(control, method, path, body, headers, *rest)

    monkeypatch.setattr(Control, "call", late)
    update = await publish(make_sender(chain()), 1, other_model)
    assert (list(update.relayed), update.failed, update.rerouted) == (NAMES[1:], {}, {})
    assert await all_serve(engines, other_model, 1)


@pytest.mark.parametrize(
    "given_up", quick(("at the deadline", "because it is late"), "at the deadline")
)
async def test_an_engine_behind_one_that_hangs_in_the_transfer_is_served_in_the_same_update(
    engines: list[Sglang],
    make_sender: MakeSender,
    rendezvous: Rendezvous,
    model: Path,
    other_model: Path,
    given_up: str,
) -> None:
    transport = chain(LONG)
    is_late = given_up == "because it is late"
    sender = make_sender(transport, timeoutSeconds=LONG, lateSeconds=TIMEOUT if is_late else LONG)
    assert (await publish(sender, 1, model)).failed == {}  # creates all links
    assert await begin(sender, 2, joiners_only=False) == 3
    if not is_late:
        hurry(sender, transport)
    first, *rest = buckets(on_device(other_model), BUCKET, Layout())
    await sender.send(first)
    engines[1].signal(signal.SIGSTOP)
    try:
        for bucket in rest:
            await sender.send(bucket)
        update = await sender.finish()
    finally:
        engines[1].signal(signal.SIGCONT)
    assert (list(update.engines), list(update.failed)) == ([NAMES[0], NAMES[2]], [NAMES[1]])
    assert ("only this engine was late" in update.failed[NAMES[1]]) == is_late
    assert sorted(update.rerouted) == (NAMES[2:] if is_late else NAMES[1:])
    assert await all_serve([engines[0], engines[2]], other_model, 2)
    ledger = await rendezvous.ledger()
    assert [ledger[name].admitted for name in NAMES] == [True, False, True]
    hurry(sender, transport, PATIENCE)
    # The engine is alive: the next update closes the chain again.
    update = await publish(sender, 3, model)
    assert (len(update.relayed), update.failed, update.rerouted) == (2, {}, {})
    assert await all_serve(engines, model, 3)


async def test_an_engine_that_joins_gets_the_weights_and_then_closes_the_chain(
    engines: list[Sglang],
    join_engine: JoinEngine,
    make_sender: MakeSender,
    model: Path,
    other_model: Path,
) -> None:
    transport = chain()
    sender = make_sender(transport)
    plan = await sender.plan(1, joiners_only=False)
    early = [engine for engine in plan.engines if engine.member.name != NAMES[1]]
    await sender.prepare(1, early)
    await sender.pause()
    update = await send(sender, other_model)
    assert (list(update.engines), list(update.relayed)) == ([NAMES[0], NAMES[2]], [NAMES[2]])
    update = await publish(sender, 1, other_model, joiners_only=True)
    assert (list(update.engines), list(update.relayed)) == ([NAMES[1]], [])
    assert await all_serve(engines, other_model, 1)
    update = await publish(sender, 2, model)
    assert (list(update.relayed), update.rerouted) == (NAMES[1:], {})
    assert list(transport._upstream.items()) == [(NAMES[2], NAMES[0]), (NAMES[1], NAMES[2])]
    assert await all_serve(engines, model, 2)


async def test_engines_of_a_trainer_that_is_gone_in_the_transfer_are_its_successors(
    engines: list[Sglang], make_sender: MakeSender, model: Path, other_model: Path
) -> None:
    transport = chain()
    dead = make_sender(transport, attempt=1)
    assert await begin(dead, 1, joiners_only=False) == 3
    stale = buckets(on_device(model), BUCKET, Layout())
    await dead.send(next(stale))
    route = transport._routes[NAMES[2]]
    waiting = asyncio.create_task(
        transport._send_over_link(transport._peers[NAMES[2]], next(stale), route, 1, flush=False)
    )  # waits for a bucket that its upstream engine will never relay
    await asyncio.sleep(0.5)
    transport._links.clear()
    update = await publish(make_sender(chain(attempt=2), attempt=2), 2, other_model)
    assert (list(update.engines), len(update.relayed), update.failed) == (NAMES, 2, {})
    assert await all_serve(engines, other_model, 2)
    waiting.cancel()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_engines_of_one_and_of_two_ranks_relay_weights_and_survive_the_first(
    sglang: Sglang,
    other_engines: list[Sglang],
    make_sender: MakeSender,
    join_engine: JoinEngine,
    model: Path,
    other_model: Path,
    tmp_path: Path,
) -> None:
    """The first engine hangs: both ranks of the second one agree that a bucket has not arrived."""
    other_engines[1].reset()
    with serving(model, tmp_path / "log", "--tp-size", "2", **cores(2)) as two_ranks:
        engines = [sglang, two_ranks, other_engines[1]]
        for name, server, ranks in zip(NAMES, engines, (1, 2, 1), strict=True):
            await join_engine(name, server.address, ranks)
        transport = chain(LONG)
        sender = make_sender(transport, timeoutSeconds=LONG)
        update = await publish(sender, 1, other_model)
        assert (list(update.relayed), update.rerouted) == (NAMES[1:], {})
        assert await all_serve(engines, other_model, 1)
        assert await begin(sender, 2, joiners_only=False) == 3
        hurry(sender, transport)
        first, *rest = buckets(on_device(model), BUCKET, Layout())
        await sender.send(first)
        sglang.signal(signal.SIGSTOP)
        try:
            for bucket in rest:
                await sender.send(bucket)
            update = await sender.finish()
        finally:
            sglang.signal(signal.SIGCONT)
        assert (list(update.engines), sorted(update.rerouted)) == (NAMES[1:], NAMES[1:])
        assert await all_serve(engines[1:], model, 2)


async def test_an_engine_behind_one_that_is_killed_in_the_transfer_is_served_in_the_same_update(
    engines: list[Sglang],
    make_sender: MakeSender,
    rendezvous: Rendezvous,
    model: Path,
    other_model: Path,
) -> None:
    """Run last, because the killed engine does not come back."""
    sender = make_sender(chain(LONG), timeoutSeconds=LONG)
    await publish(sender, 1, model)
    assert await begin(sender, 2, joiners_only=False) == 3
    first, second, *rest = buckets(on_device(other_model), BUCKET, Layout())
    await sender.send(first)
    await sender.send(second)
    engines[1].kill()
    for bucket in rest:
        await sender.send(bucket)
    update = await sender.finish()
    assert (list(update.engines), list(update.failed)) == ([NAMES[0], NAMES[2]], [NAMES[1]])
    assert sorted(update.rerouted) == NAMES[1:]
    assert await all_serve([engines[0], engines[2]], other_model, 2)
    assert (await rendezvous.ledger())[NAMES[2]].member.version == 2
    update = await publish(sender, 3, model)
    assert (list(update.relayed), list(update.failed)) == ([NAMES[2]], [NAMES[1]])
    assert await all_serve([engines[0], engines[2]], model, 3)
