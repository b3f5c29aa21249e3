"""The service over gRPC, in its own process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from tests.unit.buffer.buffer_tools import BufferProcess, Client, error_of, make_group, make_sample

READY = pb.TakeBatchResponse.STATE_READY
WAITING = pb.TakeBatchResponse.STATE_WAITING
STORED = pb.SubmitResponse.OUTCOME_STORED


async def test_a_step_from_lease_to_checkpoint(client: Client) -> None:
    leased = (await client.lease(count=9)).groups
    assert [g.prompt.group_id for g in leased] == [0, 1, 2, 3]
    answers = await client.submit(make_group(g.prompt) for g in leased)
    assert {a.outcome for a in answers.values()} == {STORED}
    batch = await client.take(1, ranks=2)
    assert batch.state == READY
    assert [(s.group_id, s.index) for s in batch.sequences] == [
        (g, i) for g in range(4) for i in range(2)
    ]
    shards = [await client.shard(1, rank, 2) for rank in range(2)]
    rank_of = {
        (g.prompt.group_id, s.index): r
        for r, shard in enumerate(shards)
        for g in shard
        for s in g.samples
    }
    assert rank_of == {(s.group_id, s.index): s.rank for s in batch.sequences}
    await client.commit(1, reward=0.5)
    assert await client.checkpoint(1) == 4
    stats = await client.stats()
    assert (stats.step, stats.version, stats.checkpoint_step) == (1, 1, 1)
    assert stats.counters["groups_trained"] == 4
    assert stats.counters["samples_trained"] == 8
    assert stats.metrics["reward"] == 0.5


@pytest.mark.parametrize("padding", [0, 2 << 20], ids=["parsed whole", "parsed by sample"])
async def test_no_group_of_a_peer_ends_the_buffer(client: Client, padding: int) -> None:
    [leased] = (await client.lease()).groups
    hostile = ['{"a":' + "9" * 5000 + "}", "[" * 100_000, '{"filtered":"\\ud83d"}', '{"turns":5}']
    for metadata in hostile:
        group = make_group(leased.prompt)
        group.samples[1].metadata_json = metadata
        group.samples[1].response = "x" * padding
        answers = await client.submit([group])
        assert answers[0].outcome == pb.SubmitResponse.OUTCOME_REFUSED
        assert "samples[1].metadataJson" in answers[0].message
        [leased] = (await client.lease()).groups
    assert (await client.submit([make_group(leased.prompt)]))[0].outcome == STORED


async def test_an_older_trainer_is_refused(client: Client) -> None:
    await client.rewind(0, attempt=2)
    code, details = await error_of(client.take(1, attempt=1))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "replaced by attempt 2" in details


async def test_what_was_acknowledged_survives_a_restart(
    make_server: Callable[..., BufferProcess],
) -> None:
    server = make_server()
    async with Client(server.start()) as client:
        leased = (await client.lease(count=4)).groups
        await client.submit([make_group(leased[0].prompt)])
    assert server.end() == 143
    async with Client(server.start()) as client:
        stats = await client.stats()
        assert (stats.depth, stats.leases, stats.counters["groups_lost"]) == (1, 3, 0)
        assert await client.heartbeat(g.prompt for g in leased) == []
        answers = await client.submit(make_group(g.prompt) for g in leased)
        assert [answers[i].outcome for i in range(4)] == [
            pb.SubmitResponse.OUTCOME_DUPLICATE,
            STORED,
            STORED,
            STORED,
        ]


async def test_a_batch_tells_for_how_long_only_late_groups_were_missing(
    make_server: Callable[..., BufferProcess],
) -> None:
    server = make_server(rollout__mode="async", rollout__maxStaleness=1)
    async with Client(server.start()) as client:
        slow, *others = (await client.lease(count=8)).groups
        await client.submit(make_group(g.prompt) for g in others)
        batch = await client.take(1)
        assert (batch.state, batch.late_seconds) == (READY, 0.0)
        await client.commit(1)
        more = (await client.lease(count=4, version=1)).groups
        await asyncio.sleep(0.3)
        waiting = await client.take(2, wait=0.1)
        assert (waiting.state, waiting.late_seconds) == (WAITING, 0.0), "three of four are there"
        await client.submit(make_group(g.prompt, version=1) for g in more)
        taking = asyncio.create_task(client.take(2, wait=20))
        await asyncio.sleep(1.0)
        assert not taking.done()
        stats = await client.stats()
        assert "1 groups that would be too old for the next batch: 0" in stats.waiting_for
        await client.submit([make_group(slow.prompt)])
        batch = await taking
        assert batch.state == READY
        assert 0.9 < batch.late_seconds < batch.wait_time_seconds - 0.05
        await client.commit(2)
        last = (await client.lease(count=4, version=2)).groups
        await client.submit(make_group(g.prompt, version=2) for g in last)
        assert (await client.take(3, wait=20)).late_seconds == 0.0, "of this step alone"


async def test_a_lease_waits_for_room_and_a_batch_for_groups(client: Client) -> None:
    first = (await client.lease(count=4)).groups
    waiting_worker = asyncio.create_task(client.lease("rollout-1", version=1, wait=20))
    waiting_trainer = asyncio.create_task(client.take(1, wait=20))
    await asyncio.sleep(0.3)
    assert not waiting_worker.done()
    assert not waiting_trainer.done()
    await client.submit(make_group(g.prompt) for g in first)
    assert (await waiting_trainer).state == READY
    await client.commit(1)
    assert [g.prompt.group_id for g in (await waiting_worker).groups] == [4]


async def test_workers_share_a_step_and_one_that_is_gone_gets_no_part(
    make_server: Callable[..., BufferProcess],
) -> None:
    server = make_server()
    async with Client(server.start()) as first, Client(server.address) as second:

        async def both(version: int) -> list[list[pb.LeasedGroup]]:
            asking = (
                client.lease(name, 4, version, wait=20)
                for name, client in (("rollout-0", first), ("rollout-1", second))
            )
            return [leases.groups for leases in await asyncio.gather(*asking)]

        async def train(step: int, groups: list[pb.LeasedGroup]) -> None:
            await first.submit(make_group(g.prompt, version=step - 1) for g in groups)
            assert (await first.take(step, wait=20)).state == READY
            await first.commit(step)

        groups = (await first.lease(count=4)).groups
        waiting = asyncio.create_task(both(0))
        await asyncio.sleep(0.3)
        await train(1, groups)
        assert await waiting == [[], []]
        halves = await both(1)
        assert [len(half) for half in halves] == [2, 2]
        waiting = asyncio.create_task(both(1))
        await asyncio.sleep(0.3)
        await second.channel.close()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await waiting
        await train(2, [*halves[0], *halves[1]])
        assert len((await first.lease("rollout-0", 4, version=2, wait=20)).groups) == 4


async def test_a_wait_ends_empty_and_says_what_is_missing(client: Client) -> None:
    await client.lease(count=4)
    assert not (await client.lease(wait=0.3)).groups
    batch = await client.take(1, wait=0.3)
    assert batch.state == pb.TakeBatchResponse.STATE_WAITING
    assert batch.waiting_for == "0 of 4 groups finished, 4 leased by rollout-0"


async def test_a_broken_group_does_not_disturb_the_others_of_its_stream(client: Client) -> None:
    leased = (await client.lease(count=3)).groups
    groups = [make_group(g.prompt, response=300_000) for g in leased]
    groups[1].samples[0].tokens = b"\0\0\0"
    answers = await client.submit(groups)
    assert [answers[i].outcome for i in range(3)] == [
        STORED,
        pb.SubmitResponse.OUTCOME_REFUSED,
        STORED,
    ]
    assert "samples[0].tokens" in answers[1].message


async def test_pieces_of_several_groups_may_be_interleaved(client: Client) -> None:
    leased = (await client.lease(count=2)).groups
    sent = [
        list(codec.to_chunks(k, make_group(g.prompt, response=250_000).SerializeToString()))
        for k, g in enumerate(leased)
    ]
    assert len(sent[0]) > 2

    async def chunks() -> AsyncIterator[common.Chunk]:
        for pair in zip(*sent, strict=True):
            for chunk in pair:
                yield chunk

    answers = [a async for a in client.stub.Submit(chunks(), metadata=client.metadata, timeout=20)]
    assert {a.outcome for a in answers} == {STORED}


async def test_partial_samples_come_with_the_next_lease(client: Client) -> None:
    leased = (await client.lease()).groups[0]
    sample = make_sample(0, status=common.SAMPLE_STATUS_ABORTED, reward=None)
    answers = await client.give_back([common.SampleGroup(prompt=leased.prompt, samples=[sample])])
    assert answers[0].accepted
    again = (await client.lease("rollout-1")).groups[0]
    assert again.prompt.group_id == leased.prompt.group_id
    assert list(again.partial.samples) == [sample]


async def test_evaluations_are_waited_for(make_server: Callable[..., BufferProcess]) -> None:
    server = make_server(evaluation={"everySteps": 2})
    async with Client(server.start()) as client:
        leased = (await client.lease(count=3)).groups
        answer = await client.evaluations(wait_for=0, wait=0.2)
        assert (list(answer.pending_versions), list(answer.evaluations)) == ([0], [])
        waiting = asyncio.create_task(client.evaluations(wait_for=0, wait=20))
        await client.submit(make_group(g.prompt, samples=1) for g in leased)
        (evaluation,) = (await waiting).evaluations
        assert (evaluation.version, evaluation.dataset, evaluation.metrics["reward"]) == (
            0,
            "held-out",
            0.0,
        )
        examples = await client.examples(0, "held-out")
        assert evaluation.examples == len(examples) == 3
        assert [group.prompt.group_id for group in examples] == [0, 1, 2]


async def test_exhausted_prompts_end_workers_and_trainer(
    make_server: Callable[..., BufferProcess],
) -> None:
    server = make_server(rows=4, trainer={"epochs": 1})
    async with Client(server.start()) as client:
        leased = (await client.lease(count=9)).groups
        await client.submit(make_group(g.prompt) for g in leased)
        await client.take(1)
        await client.commit(1)
        batch = await client.take(2, wait=10)
        assert batch.state == pb.TakeBatchResponse.STATE_EXHAUSTED
        await client.checkpoint(1)
        answer = await client.lease(version=1, wait=10)
        assert (list(answer.groups), answer.exhausted) == ([], True)


async def test_calls_without_the_jobs_token_are_refused(
    make_server: Callable[..., BufferProcess],
) -> None:
    server = make_server({"SLUICE_TOKEN": "secret"})
    address = server.start()
    async with Client(address) as stranger:
        code, _ = await error_of(stranger.stats())
        assert code == grpc.StatusCode.UNAUTHENTICATED
    async with Client(address, token="secret") as friend:
        assert (await friend.stats()).total_steps == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.take(1, ranks=0), "data_parallel_size: 0 is below 1"),
        (lambda c: c.take(0), "step 0: steps count from 1"),
    ],
)
async def test_calls_that_can_never_be_right(
    client: Client, call: Callable[[Client], Awaitable[object]], message: str
) -> None:
    code, details = await error_of(call(client))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, message)


@pytest.mark.parametrize(
    "name", ["", "a/b", "a\nb", "\x1b[2J", "-a", "ü", "a" * 201, "filler"], ids=ascii
)
async def test_a_worker_has_a_name(client: Client, name: str) -> None:
    code, details = await error_of(client.lease(worker=name))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"worker.name: {name[:80]!a} is not a name")
    assert (await client.lease(worker="demo-rollout-0.a_b")).groups


async def test_a_shard_of_a_batch_that_is_not_fixed(client: Client) -> None:
    code, details = await error_of(client.shard(1))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith("batch 1 is not fixed: 0 of 4 groups finished")
