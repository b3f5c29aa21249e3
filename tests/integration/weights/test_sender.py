"""Weight updates by the real sender, over gloo and over a directory, into a real engine."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _world

from sluice.engines.http import connections
from sluice.engines.protocol import EngineRefusedError
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.control import Control
from sluice.engines.sglang.layout import Layout
from sluice.runtime.pod_env import free_port
from sluice.wire import rpc
from sluice_trainer.weights.buckets import Bucket, buckets
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.disk import Disk, VersionDirectories
from sluice_trainer.weights.sender import WeightSender
from sluice_trainer.weights.transport import Peer
from tests.integration.conftest import Server
from tests.integration.engines import (
    Sglang,
    backend,
    call,
    device,
    distance,
    engine_environment,
    gpus,
    log_probs,
    tensors,
    tolerance,
    until,
)
from tests.integration.rendezvous_server import Rendezvous, eventually
from tests.integration.transformers_engine import TransformersServer
from tests.integration.weights.conftest import PATIENCE, ROOT, SLACK, TIMEOUT, FakeEngine
from tests.integration.weights.tools import (
    BUCKET,
    begin,
    on_device,
    publish,
    send,
    serves,
    set_deadline,
)

MakeSender = Callable[..., WeightSender]
JoinEngine = Callable[..., Any]


async def test_new_weights_arrive_and_the_engine_may_work(
    server: Server,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    model: Path,
    other_model: Path,
) -> None:
    engine = await join_engine("rollout-0", server.address)
    assert await serves(server.url, model, 0, server.engine)
    update = await publish(make_sender(), 5, other_model)
    assert (list(update.engines), update.failed) == (["rollout-0"], {})
    assert set(update.seconds) == {"prepare", "pause", "transfer", "verify", "resume", "paused"}
    assert await serves(server.url, other_model, 5, server.engine)
    assert not await serves(server.url, model, 5, server.engine)
    entry = (await rendezvous.ledger())["rollout-0"]
    assert (entry.admitted, entry.member.version) == (True, 5)
    await eventually(engine.membership, lambda: engine.membership.latest.admitted)
    assert engine.membership.latest.version == 5


async def test_the_second_update_uses_the_same_communicator(
    server: Server,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    model: Path,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", server.address)
    sender, groups = make_sender(), set(_world.pg_names)
    await publish(sender, 1, other_model)
    first = set(_world.pg_names) - groups
    generation = (await rendezvous.ledger())["rollout-0"].generation
    await publish(sender, 2, model)
    assert set(_world.pg_names) - groups == first
    assert len(first) == 1
    assert (await rendezvous.ledger())["rollout-0"].generation == generation
    assert await serves(server.url, model, 2, server.engine)


@pytest.mark.parametrize("mode", ["in_place", "abort"])
async def test_the_other_ways_to_pause(
    server: Server, join_engine: JoinEngine, make_sender: MakeSender, other_model: Path, mode: str
) -> None:
    await join_engine("rollout-0", server.address)
    update = await publish(make_sender(pauseMode=mode), 3, other_model)
    assert update.failed == {}
    assert await serves(server.url, other_model, 3, server.engine)


async def test_a_running_request_computes_its_cache_anew_after_a_retract(
    server: Server, join_engine: JoinEngine, make_sender: MakeSender, model: Path, other_model: Path
) -> None:
    await join_engine("rollout-0", server.address)
    async with server.engine.client(server.url) as engine:
        await engine.wait_ready(30.0)
        sampling = {"max_new_tokens": 900, "ignore_eos": True}
        running = asyncio.create_task(engine.generate("long", [20, 21, 22], sampling, cache="0"))
        await server.generated(40)
        update = await publish(make_sender(pauseMode="retract"), 1, other_model)
        assert update.failed == {}
        generation = await running
    assert [span.version for span in generation.spans] == [0, 1]
    at = generation.spans[0].end
    assert 30 < at < 900
    expected = log_probs(other_model, [20, 21, 22, *generation.tokens], 900)
    assert distance(generation.log_probs[at:], expected[at:]) < tolerance()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_tokens_on_their_way_in_an_update_keep_the_version_of_their_weights(
    sglang: Sglang,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    model: Path,
    other_model: Path,
    mode: str,
) -> None:
    """Tokens pass a process that a busy engine waits for; the new version number does not."""
    await join_engine("rollout-0", sglang.address)
    sender = make_sender(pauseMode=mode)
    await publish(sender, 1, model)
    async with Client(sglang.url) as engine:
        await engine.wait_ready(30.0)
        sampling = {"max_new_tokens": 900, "ignore_eos": True}
        running = asyncio.create_task(engine.generate(f"held-{mode}", [20, 21, 22], sampling))
        await sglang.generated(40)
        held = sglang.part("detokenizer")
        held.suspend()
        await sglang.generated(140)
        update = await publish(sender, 2, other_model)
        held.resume()
        generation = await running
    assert update.failed == {}
    assert [span.version for span in generation.spans] == [1, 2]
    at = generation.spans[0].end
    assert 130 < at < 900
    tokens = [20, 21, 22, *generation.tokens]
    assert distance(generation.log_probs[:at], log_probs(model, tokens, 900)[:at]) < tolerance()
    if mode == "retract":
        assert (
            distance(generation.log_probs[at:], log_probs(other_model, tokens, 900)[at:])
            < tolerance()
        )


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_nothing_old_is_found_or_left_after_an_update(
    sglang: Sglang, join_engine: JoinEngine, make_sender: MakeSender, other_model: Path, mode: str
) -> None:
    """The new request's client does not know of the update; a running request keeps the cache."""
    await join_engine("rollout-0", sglang.address)
    prompt, sampling = list(range(20, 60)), {"max_new_tokens": 12, "ignore_eos": True}
    async with Client(sglang.url) as engine:
        await engine.wait_ready(30.0)
        await engine.generate(f"before-{mode}", prompt, sampling, cache="0")
        lasting = {**sampling, "max_new_tokens": 2000}
        running = asyncio.create_task(engine.generate(f"lasting-{mode}", [70], lasting, cache="0"))
        await sglang.generated(40)
        await asyncio.to_thread(
            until, lambda: sglang.metric("kv_evictable_tokens"), 20.0, "something in the cache"
        )
        update = await publish(make_sender(pauseMode=mode), 1, other_model)
        assert update.failed == {}
        empty = lambda: sglang.metric("kv_evictable_tokens") == 0  # noqa: E731
        await asyncio.to_thread(until, empty, 20.0, "nothing in the cache but what is in use")
        generation = await engine.generate(f"after-{mode}", prompt, sampling, cache="0")
        assert not running.done()
        running.cancel()
    assert [span.version for span in generation.spans] == [1]
    assert (
        distance(generation.log_probs, log_probs(other_model, prompt + generation.tokens, 12))
        < tolerance()
    )


async def test_joiners_alone_get_the_weights_that_others_have(
    sglang: Sglang,
    fake_engine: FakeEngine,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    model: Path,
) -> None:
    await join_engine("rollout-1", fake_engine.address)
    sender = make_sender()
    await publish(sender, 1, model)
    before = call(fake_engine.url + "/received")[1]
    assert await begin(sender, 1, joiners_only=True) == 0
    await sender.finish()
    await join_engine("rollout-0", sglang.address)
    update = await publish(sender, 1, model, joiners_only=True)
    assert (list(update.engines), update.in_turn) == (["rollout-0"], 1)
    assert call(fake_engine.url + "/received")[1] == before
    assert await serves(sglang.url, model, 1)
    assert all(entry.admitted for entry in (await rendezvous.ledger()).values())


@pytest.mark.skipif(
    gpus() > 0, reason="SGLang 0.5.17, the release for GPUs, has no sessions to end"
)
async def test_an_engine_that_refuses_is_dropped_and_comes_back_with_a_new_communicator(
    sglang: Sglang,
    fake_engine: FakeEngine,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    other_model: Path,
) -> None:
    engine = await join_engine("rollout-0", sglang.address)
    await join_engine("rollout-1", fake_engine.address)
    sender = make_sender(timeoutSeconds=120)
    assert await begin(sender, 1, joiners_only=False) == 2
    generation = (await rendezvous.ledger())["rollout-0"].generation
    assert (
        call(sglang.url + "/end_weight_update", {})[0] == 200
    )  # now it refuses the first bucket with HTTP 400
    started = time.monotonic()
    update = await send(sender, other_model)
    assert time.monotonic() - started < SLACK  # refused at once, without a wait
    assert list(update.engines) == ["rollout-1"]
    assert (
        "must run between begin_weight_update() and end_weight_update()"
        in update.failed["rollout-0"]
    )
    await eventually(engine.membership, lambda: engine.membership.latest.dropped)
    entry = (await rendezvous.ledger())["rollout-0"]
    assert not entry.admitted
    assert entry.generation > generation
    update = await publish(sender, 1, other_model, joiners_only=True)
    assert (list(update.engines), update.failed) == (["rollout-0"], {})
    assert await serves(sglang.url, other_model, 1)
    await eventually(engine.membership, lambda: engine.membership.latest.admitted)
    assert not engine.membership.latest.dropped


async def test_weights_that_do_not_fit_are_refused_in_the_same_words_each_time(
    server: Server, join_engine: JoinEngine, make_sender: MakeSender, model: Path
) -> None:
    """The trainer concludes from equal answers that another try does not help."""
    await join_engine("rollout-0", server.address)
    sender, answers = make_sender(), list[str]()
    (name, tensor), *others = on_device(model)
    for version in (1, 2, 3):
        update = await publish(sender, version, [(name, tensor[:-1].contiguous()), *others])
        assert (update.engines, [*update.refused]) == ((), ["rollout-0"])
        answers.append(update.refused["rollout-0"])
    assert len(set(answers)) == 1, answers
    print(answers[0])
    assert (await publish(sender, 4, model)).failed == {}


async def test_a_session_that_a_dead_trainer_left_open_is_no_obstacle(
    server: Server, join_engine: JoinEngine, make_sender: MakeSender, other_model: Path
) -> None:
    await join_engine("rollout-0", server.address)
    assert await begin(make_sender(attempt=1), 1, joiners_only=False) == 1
    update = await publish(make_sender(attempt=2), 1, other_model)
    assert (list(update.engines), update.failed) == (["rollout-0"], {})
    assert await serves(server.url, other_model, 1, server.engine)


# Each mode and each moment once.
QUICK = {
    ("in_place", "paused"),
    ("abort", "in a session"),
    ("retract", "half way"),
    ("in_place", "verified"),
}


@pytest.mark.parametrize(
    ("mode", "left"),
    [
        pytest.param(mode, left, marks=[] if (mode, left) in QUICK else pytest.mark.long)
        for mode in ("in_place", "retract", "abort")
        for left in ("paused", "in a session", "half way", "verified")
    ],
)
async def test_an_engine_that_a_dead_trainer_left_in_an_update_is_brought_back_by_the_next(
    server: Server,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    model: Path,
    other_model: Path,
    mode: str,
    left: str,
) -> None:
    await join_engine("rollout-0", server.address)
    async with server.engine.client(server.url) as engine:
        await engine.wait_ready(30.0)
        # A response that is to be aborted must not end before, also on a busy machine.
        tokens = 3000 if mode == "abort" else 900
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        running = asyncio.create_task(
            engine.generate(f"{mode}-{left}", [20, 21, 22], sampling, cache="0")
        )
        await server.generated(40)
        dead = make_sender(attempt=1, pauseMode=mode)
        plan = await dead.plan(1, joiners_only=False)
        await dead.prepare(1, plan.engines)
        assert dead.current
        [peer] = dead.current.peers.values()
        if left == "paused":
            await peer.control.pause(mode)
        else:
            await dead.pause()
        if left == "half way":
            await dead.send(next(buckets(on_device(model), BUCKET, Layout())))
        if left == "verified":
            for bucket in buckets(on_device(model), BUCKET, Layout()):
                await dead.send(bucket)
            await dead._verify(peer)
        update = await publish(make_sender(attempt=2, pauseMode=mode), 2, other_model)
        assert (list(update.engines), update.failed) == (["rollout-0"], {})
        generation = await running
        assert generation.finish == ("abort" if mode == "abort" else "length")
    assert await serves(server.url, other_model, 2, server.engine)


async def test_a_trainer_that_is_killed_in_the_transfer_leaves_an_engine_for_its_successor(
    server: Server,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    model: Path,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", server.address)
    arguments = [
        sys.executable,
        "-m",
        "tests.integration.weights.dying_trainer",
        rendezvous.address,
        str(model),
    ]
    arguments.append(type(server.engine).__name__)
    variables = engine_environment() | {"CUDA_VISIBLE_DEVICES": "0"}  # the engine uses the last GPU
    dying = await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, env=variables, stdout=PIPE)
    assert dying.stdout
    assert await asyncio.wait_for(dying.stdout.readline(), 60) == b"half-way\n"
    dying.kill()
    await dying.wait()
    update = await publish(make_sender(attempt=2, timeoutSeconds=30), 1, other_model)
    assert (list(update.engines), update.failed) == (["rollout-0"], {})
    assert await serves(server.url, other_model, 1, server.engine)


async def test_an_engine_that_hangs_is_left_in_time_and_the_other_is_served(
    sglang: Sglang,
    fake_engine: FakeEngine,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", sglang.address)
    await join_engine("rollout-1", fake_engine.address)
    sender = make_sender(timeoutSeconds=TIMEOUT)
    assert await begin(sender, 1, joiners_only=False) == 2
    sglang.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        update = await send(sender, other_model)
        assert TIMEOUT * 0.9 < time.monotonic() - started < TIMEOUT + SLACK
    finally:
        sglang.signal(signal.SIGCONT)
    assert list(update.engines) == ["rollout-1"]
    assert update.failed["rollout-0"] in (
        f"transfer: not done after {TIMEOUT:g} s",
        f"transfer: /update_weights_from_distributed: no answer after {TIMEOUT:g} s",
    )
    expected = sum(
        int(t.contiguous().view(-1).view(torch.uint8).sum()) for _, t in tensors(other_model)
    )
    received = call(fake_engine.url + "/received")[1]
    assert (received["sum"], received["weight_version"]) == (expected, "1")
    ledger = await rendezvous.ledger()
    assert (ledger["rollout-0"].admitted, ledger["rollout-1"].admitted) == (False, True)
    set_deadline(sender, PATIENCE)
    # The engine is alive, and the next update takes it back.
    update = await publish(sender, 2, other_model)
    assert (sorted(update.engines), update.failed) == (["rollout-0", "rollout-1"], {})
    assert await serves(sglang.url, other_model, 2)


async def test_an_engine_that_is_killed_in_the_transfer_does_not_affect_the_other(
    sglang: Sglang,
    fake_engine: FakeEngine,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", sglang.address)
    await join_engine("rollout-1", fake_engine.address)
    deadline = 3 * TIMEOUT  # applies to the other engine too, which may be slow on a busy machine
    sender = make_sender(timeoutSeconds=deadline)
    assert await begin(sender, 1, joiners_only=False) == 2
    first, *rest = buckets(on_device(other_model), BUCKET, Layout())
    await sender.send(first)
    fake_engine.kill()
    started = time.monotonic()
    for bucket in rest:
        await sender.send(bucket)
    update = await sender.finish()
    assert time.monotonic() - started < deadline + SLACK
    assert list(update.engines) == ["rollout-0"]
    assert list(update.failed) == ["rollout-1"]
    assert await serves(sglang.url, other_model, 1)


async def test_an_engine_that_never_joins_the_communicator_is_left_in_time(
    sglang: Sglang,
    fake_engine: FakeEngine,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", sglang.address)
    await join_engine("rollout-1", fake_engine.address)
    fake_engine.signal(signal.SIGSTOP)
    deadline = 3 * TIMEOUT  # the other engine's, too, which a busy machine holds up
    started = time.monotonic()
    sender, groups = make_sender(timeoutSeconds=deadline), set(_world.pg_names)
    update = await publish(sender, 1, other_model)
    assert time.monotonic() - started < deadline + SLACK
    assert list(update.engines) == ["rollout-0"]
    assert update.failed["rollout-1"].startswith("prepare: ")
    assert len(set(_world.pg_names) - groups) == 1
    assert await serves(sglang.url, other_model, 1)


async def test_an_engine_that_is_gone_before_it_joins_delays_no_other(
    fake_engine: FakeEngine,
) -> None:
    """The trainer's side of its communicator waits until the deadline, but other engines do not."""
    transport = Collective(backend(), "127.0.0.1", 10 * SLACK, "trainer-0-1")
    async with connections.session() as session:

        def peer(name: str, attempt: int, address: str) -> Peer:
            return Peer(
                name, attempt, attempt, 1, Control(address, session, 10 * SLACK, "trainer-0/1")
            )

        gone = peer("rollout-0", 1, f"127.0.0.1:{free_port()}")
        async with asyncio.timeout(SLACK):
            with pytest.raises(EngineRefusedError, match="Cannot connect"):
                await transport.prepare(gone)
            await transport.prepare(peer("rollout-0", 2, fake_engine.address))
            await transport.prepare(peer("rollout-1", 1, fake_engine.address))
    for name in ("rollout-0", "rollout-1"):
        transport.abandon(name)


@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")
async def test_an_engine_with_other_nccl_settings_is_left_in_time(
    sglang: Sglang,
    mismatched_engine: FakeEngine,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", sglang.address)
    await join_engine("rollout-1", mismatched_engine.address)
    started = time.monotonic()
    sender = make_sender(timeoutSeconds=TIMEOUT)
    update = await publish(sender, 1, other_model)
    assert time.monotonic() - started < TIMEOUT + SLACK
    assert (list(update.engines), list(update.failed)) == (["rollout-0"], ["rollout-1"])
    update = await publish(sender, 2, other_model)
    assert "rollout-0" in update.engines
    assert await serves(sglang.url, other_model, 2)


async def test_an_abandoned_communicator_is_released_without_blocking_the_event_loop(
    fake_engine: FakeEngine,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
) -> None:
    """A gloo group waits for stuck work when it is destroyed, but the event loop must go on.

    All heartbeats depend on it.
    """
    await join_engine("rollout-0", fake_engine.address)
    transport = Collective(backend(), "127.0.0.1", TIMEOUT, "trainer-0-1")
    sender, groups = make_sender(transport, timeoutSeconds=TIMEOUT), set(_world.pg_names)
    assert await begin(sender, 1, joiners_only=False) == 1
    fake_engine.signal(signal.SIGSTOP)
    # More than the sockets buffer.
    large = [("x", torch.zeros(64 << 20, dtype=torch.uint8, device=device()))]
    [bucket] = buckets(large, 128 << 20, Layout())
    longest = asyncio.create_task(longest_gap())
    await sender.send(bucket)
    await sender.finish()
    await asyncio.sleep(0)
    longest.cancel()
    assert await longest < TIMEOUT / 2
    assert set(_world.pg_names) == groups
    assert not [pg for pg in _world.pg_backend_config if pg not in _world.pg_names]


async def longest_gap() -> float:
    """Measure the longest time between two turns of the event loop, until cancelled."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest


async def test_communicators_of_engines_that_were_scaled_away_are_released(
    fake_engine: FakeEngine,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
) -> None:
    leaving = await join_engine("rollout-0", fake_engine.address)
    await join_engine("rollout-1", fake_engine.address)
    sender, groups = make_sender(), set(_world.pg_names)
    plan = await sender.plan(1, joiners_only=False)
    await sender.keep(plan.engines)
    await sender.prepare(1, plan.engines)
    assert len(set(_world.pg_names) - groups) == 2
    await leaving.membership.__aexit__()
    async with asyncio.timeout(SLACK):
        while len((plan := await sender.plan(2, joiners_only=False)).engines) > 1:
            await asyncio.sleep(0.02)
    await sender.keep(plan.engines)
    assert len(set(_world.pg_names) - groups) == 1


async def test_weights_also_arrive_over_a_directory(
    server: Server,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    model: Path,
    other_model: Path,
    tmp_path: Path,
) -> None:
    await join_engine("rollout-0", server.address)
    sender = make_sender(
        Disk(VersionDirectories(tmp_path, 1), model, drawn=False), transport="disk"
    )
    update = await publish(sender, 1, other_model)
    assert (list(update.engines), update.failed) == (["rollout-0"], {})
    assert update.in_turn == 0
    assert await serves(server.url, other_model, 1, server.engine)
    await publish(sender, 2, model)
    assert await serves(server.url, model, 2, server.engine)
    assert [path.name for path in tmp_path.iterdir()] == ["version_0000002.attempt1"]
    assert (await rendezvous.ledger())["rollout-0"].member.version == 2


async def send_all(sender: WeightSender, buckets: Iterable[Bucket]) -> None:
    for bucket in buckets:
        await sender.send(bucket)


@pytest.mark.parametrize(
    "wakes_up", ["while its successor sends", "after its successor has resumed"]
)
async def test_a_trainer_that_was_replaced_in_its_transfer_changes_no_weights(
    server: Server,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    model: Path,
    other_model: Path,
    wakes_up: str,
) -> None:
    """It still has a session and a communicator with the engine."""
    await join_engine("rollout-0", server.address)
    older, newer = make_sender(attempt=1), make_sender(attempt=2)
    stale = iter(buckets(on_device(model), BUCKET, Layout()))
    assert await begin(older, 1, joiners_only=False) == 1
    await older.send(next(stale))
    fresh = list(buckets(on_device(other_model), BUCKET, Layout()))
    assert await begin(newer, 2, joiners_only=False) == 1
    for bucket in fresh[:-1]:
        await newer.send(bucket)
    if wakes_up == "while its successor sends":
        with pytest.raises(rpc.RefusedError, match="attempt 1 was replaced by attempt 2"):
            await send_all(older, stale)
    await newer.send(fresh[-1])
    update = await newer.finish()
    assert (list(update.engines), update.failed) == (["rollout-0"], {})
    if wakes_up == "after its successor has resumed":
        with pytest.raises(rpc.RefusedError, match="attempt 1 was replaced by attempt 2"):
            await send_all(older, stale)
    assert await serves(server.url, other_model, 2, server.engine)


@pytest.mark.parametrize(
    "call_of",
    [
        pytest.param(lambda control: control.pause("abort"), id="pause"),
        pytest.param(lambda control: control.resume(), id="resume"),
        pytest.param(lambda control: control.begin(), id="begin"),
        pytest.param(lambda control: control.end(), id="end"),
        pytest.param(
            lambda control: control.open([], version=1, flush=True), id="load from memory"
        ),
        pytest.param(
            lambda control: control.load_from_disk("/", 1, flush=True), id="load from disk"
        ),
        pytest.param(lambda control: control.name_version(1), id="name the version"),
        pytest.param(lambda control: control.rest(), id="rest"),
        pytest.param(lambda control: control.wake(), id="wake"),
    ],
)
async def test_an_engine_refuses_every_call_of_a_trainer_that_was_replaced(
    server: Server, call_of: Any, request: pytest.FixtureRequest
) -> None:
    colocated = {"load from memory", "rest", "wake"} & set(request.node.callspec.id.split("-"))
    if isinstance(server, TransformersServer) and colocated:
        pytest.skip("the engine transformers does not share GPUs")
    async with connections.session() as session:
        newer = server.engine.control(server.address, session, SLACK, "trainer-fenced/2")
        older = server.engine.control(server.address, session, SLACK, "trainer-fenced/1")
        if isinstance(older, Control):
            older.has_session = True
        await newer.learn()
        with pytest.raises(EngineRefusedError, match="attempt 1 was replaced by attempt 2"):
            await call_of(older)


async def test_an_older_trainer_gets_no_plan(
    join_engine: JoinEngine, sglang: Sglang, make_sender: MakeSender, other_model: Path
) -> None:

    await join_engine("rollout-0", sglang.address)
    await publish(make_sender(attempt=2), 1, other_model)
    with pytest.raises(rpc.RefusedError, match="attempt 1 was replaced by attempt 2"):
        await begin(make_sender(attempt=1), 2, joiners_only=False)
