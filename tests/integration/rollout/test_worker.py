"""The worker between a real engine, a real buffer and a real rendezvous."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.engines.protocol import Client
from sluice.runtime.pod_env import free_port
from sluice.samples.sample import Prompt, SampleGroup, SampleStatus, WeightSpan
from sluice.wire import codec, rpc
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout import worker as worker_module
from sluice_rollout.buffer import Outbox
from sluice_rollout.worker import WorkerError
from tests.integration.conftest import Server
from tests.integration.engines import call, distance, log_probs
from tests.integration.rendezvous_server import DEADLINE, Rendezvous
from tests.integration.rollout.pods import Pod, Services, contained, leases

READY = pb.TakeBatchResponse.STATE_READY
LONG = {"rollout__sampling__maxResponseTokens": 3000}


async def test_samples_travel_from_lease_to_batch(
    make_services: Callable[..., Services],
    engine: Client,
    server: Server,
    model: Path,
    rendezvous: Rendezvous,
) -> None:
    services = make_services()
    async with await services.start_buffer() as client, services.working(engine) as (worker, end):
        assert (await client.take(1, wait=DEADLINE)).state == READY
        groups = [codec.group_from_message(g) for g in await client.shard(1)]
        assert [g.group_id for g in groups] == [0, 1, 2, 3]
        for group, sample in ((g, s) for g in groups for s in g.samples):
            sample.check()
            assert sample.status in (SampleStatus.TRUNCATED, SampleStatus.COMPLETED)
            assert sample.reward == contained(group.prompt, sample)
            assert sample.weight_versions == [WeightSpan(0, 0, sample.response_length)]
            expected = log_probs(model, sample.tokens.tolist(), sample.response_length)
            assert distance(sample.rollout_log_probs.tolist(), expected) < 1e-4
        assert worker.group_maker.finished_samples == 8
        await client.commit(1)
        server.load_weights(model, "1")
        await rendezvous.serve(1)
        assert (await client.take(2, wait=DEADLINE)).state == READY
        await end()
        stats = await client.stats()
        assert (stats.leases, stats.counters["groups_lost"]) == (0, 0)


async def test_a_long_response_keeps_its_own_place_and_none_of_its_groups(
    make_services: Callable[..., Services], engine: Client, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    code = tmp_path / "long.py"
    code.write_text(f"""
import asyncio
from pathlib import Path


async def play(episode):
    long = episode.prompt.group_id == 0 and episode.sample.index == 0
    while long and not Path({str(done)!r}).exists():
        await asyncio.sleep(0.05)
    await episode.generate()
""")
    services = make_services(rollout__function=f"{code}:play", rollout__concurrency=2)
    async with await services.start_buffer() as client, services.working(engine) as (worker, end):
        async with asyncio.timeout(DEADLINE):
            while worker.group_maker.finished_samples < 7 or len(worker.leased_groups) > 1:
                await asyncio.sleep(0.05)
        [left] = worker.leased_groups.values()
        assert (left.load.left, worker.load.samples) == (1, 1)
        done.write_text("")
        assert (await client.take(1, wait=DEADLINE)).state == READY
        await end()
        assert worker.load.samples == 0


async def test_a_drain_returns_partial_samples_and_another_lease_continues_them(
    make_services: Callable[..., Services], engine: Client, server: Server, model: Path
) -> None:
    services = make_services(**LONG)
    async with await services.start_buffer() as client:
        async with services.working(engine) as (worker, end):
            await leases(worker, 4)
            await server.generated(8 * 30)
            await end()
            assert not worker.leased_groups
        stats = await client.stats()
        assert (stats.leases, stats.returned) == (0, 4)
        again = (await client.lease("rollout-1", count=4)).groups
        partial = [codec.sample_from_message(s) for g in again for s in g.partial.samples]
        assert len(partial) == 8
        assert {s.status for s in partial} <= {SampleStatus.ABORTED, SampleStatus.COMPLETED}
        for sample in partial:
            assert sample.response_length >= 10
            expected = log_probs(model, sample.tokens.tolist(), sample.response_length)
            assert distance(sample.rollout_log_probs.tolist(), expected) < 1e-4


async def test_a_returned_sample_goes_on_where_it_stopped(
    make_services: Callable[..., Services], engine: Client, server: Server, model: Path
) -> None:
    services = make_services(rollout__sampling__maxResponseTokens=400, rollout__batchSize=1)
    async with await services.start_buffer() as client:
        async with services.working(engine) as (_, end):
            await server.generated(2 * 30)
            await end()
        [leased] = (await client.lease("rollout-1")).groups
        partial = [codec.sample_from_message(s) for s in leased.partial.samples]
        group = SampleGroup(codec.prompt_from_message(leased.prompt), partial)
        await client.give_back([codec.group_to_message(group)])
        async with services.working(engine):
            assert (await client.take(1, wait=DEADLINE)).state == READY
        [group] = [codec.group_from_message(g) for g in await client.shard(1)]
    for before, after in zip(partial, group.samples, strict=True):
        assert after.tokens.tolist()[: len(before.tokens)] == before.tokens.tolist()
        expected = log_probs(model, after.tokens.tolist(), after.response_length)
        assert distance(after.rollout_log_probs.tolist(), expected) < 1e-4


async def test_the_buffer_comes_back_on_another_port(
    make_services: Callable[..., Services], engine: Client
) -> None:
    services = make_services(**LONG)
    async with await services.start_buffer(), services.working(engine) as (worker, end):
        await leases(worker, 4)
        first = services.buffer.address
        await asyncio.to_thread(services.buffer.end, 9)
        async with await services.start_buffer() as client:
            assert services.buffer.address != first
            await end()
            stats = await client.stats()
            assert (stats.leases, stats.returned) == (0, 4)


async def test_work_goes_on_without_a_rendezvous(
    make_services: Callable[..., Services], engine: Client, rendezvous: Rendezvous
) -> None:
    services = make_services(rollout__maxStaleness=2, rollout__mode="async", trainer__steps=3)
    async with await services.start_buffer() as client, services.working(engine):
        assert (await client.take(1, wait=DEADLINE)).state == READY
        await rendezvous.stop()
        await client.commit(1)
        assert (await client.take(2, wait=DEADLINE)).state == READY
        await rendezvous.start()


async def test_without_a_buffer_a_drain_ends_all_the_same(
    make_services: Callable[..., Services], engine: Client
) -> None:
    services = make_services(**LONG)
    async with (
        await services.start_buffer(),
        services.working(engine, drain_seconds=2.0) as (worker, end),
    ):
        await leases(worker, 4)
        await asyncio.to_thread(services.buffer.end, 9)
        await end()


async def test_short_leases_are_kept(
    make_services: Callable[..., Services], engine: Client
) -> None:
    services = make_services(**LONG, buffer__leaseSeconds=4.0)
    async with await services.start_buffer() as client, services.working(engine) as (worker, end):
        await leases(worker, 4)
        await asyncio.sleep(8.0)  # two lives of a lease
        stats = await client.stats()
        assert (stats.leases + stats.depth, stats.counters["leases_expired"]) == (4, 0)
        await end()


async def test_a_group_that_the_buffer_gave_to_another_ends_here(
    make_services: Callable[..., Services], engine: Client
) -> None:
    services = make_services(**LONG, buffer__leaseSeconds=1.5)
    async with await services.start_buffer() as client, services.working(engine) as (worker, _):
        await leases(worker, 4)
        work = next(iter(worker.leased_groups.values()))
        message = codec.group_to_message(SampleGroup(work.prompt, []))
        [answer] = (await client.give_back([message])).values()
        assert answer.accepted
        assert work.task
        await asyncio.wait([work.task], timeout=DEADLINE)
        assert work.task.cancelled()


async def test_one_reward_for_a_whole_group_is_asked_only_for_whole_groups(
    make_services: Callable[..., Services], engine: Client, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def judge(samples):\n    assert len(samples) == 2\n    return [float(i) for i in "
        "range(len(samples))]\n"
    )
    reward = {"function": f"{tmp_path}/mine.py:judge", "group": True}
    services = make_services(
        reward=reward, rollout__sampling={"maxResponseTokens": 3000, "stop": ["w001"]}
    )
    async with await services.start_buffer() as client:
        async with services.working(engine) as (worker, end):
            async with asyncio.timeout(
                DEADLINE
            ):  # one word in two hundred is a stop: some samples wait for others
                while not worker.group_maker.finished_samples:
                    await asyncio.sleep(0.01)
            await end()
        assert (await client.stats()).returned + (await client.stats()).depth == 4
        again = (await client.lease("rollout-1", count=4)).groups
        assert all(not sample.error for group in again for sample in group.partial.samples)


async def test_what_over_sampling_has_started_in_vain_is_given_up_when_its_step_is_over(
    make_services: Callable[..., Services],
    engine: Client,
    rendezvous: Rendezvous,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "HEARTBEAT_SECONDS", 1000.0)
    (tmp_path / "slow.py").write_text(
        "async def play(episode):\n"
        "    late = episode.prompt.group_id == 1 and episode.version() == 0\n"
        "    await episode.generate(max_tokens=3000 if late else 5)\n"
    )
    services = make_services(
        **LONG,
        rollout__batchSize=1,
        rollout__overSampling=2,
        rollout__function=f"{tmp_path}/slow.py:play",
        buffer__leaseSeconds=9999,
    )
    async with await services.start_buffer() as client, services.working(engine) as (worker, _):
        assert (await client.take(1, wait=DEADLINE)).state == READY
        # The other group's work may still be waiting for the buffer's answer.
        [late] = [work.task for work in worker.leased_groups.values() if work.prompt.group_id == 1]
        await client.commit(1)
        call(
            engine.url + "/update_weight_version", {"new_version": "1", "abort_all_requests": False}
        )
        await rendezvous.serve(1)
        assert late
        await asyncio.wait([late], timeout=DEADLINE)
        assert late.cancelled()
        assert (await client.take(2, wait=DEADLINE)).state == READY
        assert [g.prompt.group_id for g in await client.shard(2)] == [1]


async def test_a_filter_of_the_users_own_drops_groups(
    make_services: Callable[..., Services], engine: Client, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text("def odd(group):\n    return group.group_id % 2 == 1\n")
    services = make_services(rollout__dynamicFilter=f"{tmp_path}/odd.py:odd")
    async with await services.start_buffer() as client, services.working(engine):
        assert (await client.take(1, wait=DEADLINE)).state == READY
        groups = await client.shard(1)
        assert [g.prompt.group_id % 2 for g in groups] == [1] * 4


async def test_an_engine_that_dies_ends_the_worker_at_once(
    make_services: Callable[..., Services], server: Server
) -> None:
    services = make_services(**LONG)
    open_: list[asyncio.StreamWriter] = []
    proxy = await asyncio.start_server(_relay(server.port, open_), "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    async with (
        server.engine.client(f"http://127.0.0.1:{port}") as engine,
        await services.start_buffer(),
    ):
        await engine.wait_ready(10)
        async with services.worker(engine) as (worker, membership):
            running = asyncio.create_task(worker.run(asyncio.Event()))
            await asyncio.wait_for(membership.connected.wait(), 10)
            await services.rendezvous.serve(0)
            await leases(worker, 4)
            await server.generated(8 * 10)
            proxy.close()
            for writer in open_:
                writer.transport.abort()
            with pytest.raises(WorkerError, match=f"engine http://127.0.0.1:{port}"):
                await asyncio.wait_for(running, 5)


def _relay(port: int, open_: list[asyncio.StreamWriter]) -> Any:
    """An engine whose machine can be taken away: bytes to and from the real one."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", port)
        open_.extend([writer, to_there])
        await asyncio.gather(copy(reader, to_there), copy(there, writer), return_exceptions=True)

    return relay


class FullBuffer:
    """The stream of a buffer that answers with this status, until it is cured."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code, self.cured = code, False
        self.opened: list[float] = []

    async def __call__(self, chunks: AsyncIterator[Any]) -> AsyncIterator[pb.SubmitResponse]:
        self.opened.append(time.monotonic())
        async for chunk in chunks:
            if not self.cured:
                raise grpc.aio.AioRpcError(
                    self.code, grpc.aio.Metadata(), grpc.aio.Metadata(), "no room for group 3"
                )
            if chunk.last:
                yield pb.SubmitResponse(key=chunk.key, outcome=pb.SubmitResponse.OUTCOME_STORED)


async def test_a_full_buffer_is_asked_ever_more_rarely_until_it_has_room() -> None:
    full = FullBuffer(grpc.StatusCode.RESOURCE_EXHAUSTED)
    outbox = Outbox(full)
    running = asyncio.create_task(outbox.run())
    sent = asyncio.create_task(outbox.send(SampleGroup(Prompt(3, "x"))))
    async with asyncio.timeout(DEADLINE):
        while len(full.opened) < 4:
            await asyncio.sleep(0.05)
    full.cured = True
    pauses = [later - earlier for earlier, later in pairwise(full.opened)]
    assert all(pause >= least for pause, least in zip(pauses, (0.2, 0.4, 0.8), strict=False)), (
        pauses
    )
    assert (await asyncio.wait_for(sent, 10)).outcome == pb.SubmitResponse.OUTCOME_STORED
    running.cancel()


async def test_a_buffer_that_will_never_take_it_ends_the_worker() -> None:
    outbox = Outbox(FullBuffer(grpc.StatusCode.UNAUTHENTICATED))
    sent = asyncio.create_task(outbox.send(SampleGroup(Prompt(3, "x"))))
    with pytest.raises(rpc.RefusedError, match="UNAUTHENTICATED: no room for group 3"):
        await asyncio.wait_for(outbox.run(), 5)
    sent.cancel()


async def test_what_a_killed_worker_had_is_free_before_its_successors_engine_is_there(
    make_services: Callable[..., Services], start_pod: Callable[..., Pod], server: Server
) -> None:
    services = make_services(
        buffer__leaseSeconds=600,
        rollout__sampling__maxResponseTokens=400,
        rollout__engine=type(server.engine).__name__.lower(),
    )
    async with await services.start_buffer() as client:
        killed = start_pod(services, server.url)
        async with asyncio.timeout(DEADLINE):
            while "rollout-0" not in await services.rendezvous.ledger():
                await asyncio.sleep(0.1)
            await services.rendezvous.serve(0)
            while (await client.stats()).leases < 4:
                await asyncio.sleep(0.01)
        killed.kill()
        assert (await client.stats()).leases == 4
        successor = start_pod(services, f"http://127.0.0.1:{free_port()}", SLUICE_ATTEMPT="2")
        async with asyncio.timeout(DEADLINE):
            while (await client.stats()).leases:
                await asyncio.sleep(0.1)
        stats = await client.stats()
        assert (stats.returned, successor.process.poll()) == (4, None)
        assert await successor.end(20, signal.SIGTERM) == 143
