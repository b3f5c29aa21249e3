"""Groups of real sizes over real gRPC, far above the limit of a single message."""

from collections.abc import Callable

import numpy as np
import pytest

from sluice.wire import rpc
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group, make_sample

ABORTED = common.SAMPLE_STATUS_ABORTED
MESSAGE_LIMIT = 64 << 20
STORED = pb.SubmitResponse.OUTCOME_STORED


def bytes_of(groups: list[common.SampleGroup]) -> int:
    return sum(group.ByteSize() for group in groups)


async def test_a_whole_drain_of_long_responses_comes_back(
    make_server: Callable[..., BufferProcess],
) -> None:
    changes = {"batchSize": 32, "samplesPerPrompt": 8}
    server = make_server(rollout=changes, buffer={"storage": {"size": "1Gi"}})
    async with Client(server.start()) as client:
        leased = (await client.lease(count=32)).groups
        samples = [make_sample(i, response=30_000, status=ABORTED, reward=None) for i in range(8)]
        returned = [common.SampleGroup(prompt=g.prompt, samples=samples) for g in leased]
        assert bytes_of(returned) > MESSAGE_LIMIT
        assert all(answer.accepted for answer in (await client.give_back(returned)).values())
        again = (await client.lease("rollout-1", count=32)).groups
        assert [g.prompt.group_id for g in again] == [g.prompt.group_id for g in leased]
        assert all(list(g.partial.samples) == samples for g in again)


async def test_eight_responses_of_a_million_tokens_go_through(
    make_server: Callable[..., BufferProcess],
) -> None:
    server = make_server(
        rollout={"batchSize": 1, "samplesPerPrompt": 8}, buffer={"storage": {"size": "1Gi"}}
    )
    async with Client(server.start()) as client:
        (leased,) = (await client.lease()).groups
        group = make_group(leased.prompt, samples=8, response=1_000_000)
        assert group.ByteSize() > MESSAGE_LIMIT
        assert (await client.submit([group]))[0].outcome == STORED
        assert (await client.take(1, ranks=2)).state == pb.TakeBatchResponse.STATE_READY
        shards = [await client.shard(1, rank, 2) for rank in range(2)]
        samples = sorted(
            (s for shard in shards for g in shard for s in g.samples), key=lambda s: s.index
        )
        assert samples == list(group.samples)


async def test_examples_of_long_evaluations_are_read(
    make_server: Callable[..., BufferProcess],
) -> None:
    evaluation = {"everySteps": 2, "samplesPerPrompt": 32}
    server = make_server(evaluation=evaluation, buffer={"storage": {"size": "1Gi"}})
    async with Client(server.start()) as client:
        leased = (await client.lease(count=3)).groups
        groups = [make_group(g.prompt, samples=32, response=80_000) for g in leased]
        assert bytes_of(groups) > MESSAGE_LIMIT
        await client.submit(groups)
        (result,) = (await client.evaluations(wait_for=0, wait=20)).evaluations
        assert result.examples == 3
        assert await client.examples(0, "held-out") == groups


async def test_a_lease_whose_answer_was_lost_is_offered_again_without_blame(client: Client) -> None:
    request = pb.LeasePromptsRequest(
        worker=pb.Caller(name="rollout-0", attempt=1), max_groups=2, request=1
    )
    call = client.stub.LeasePrompts(request, metadata=rpc.metadata(""))
    await call.read()
    call.cancel()  # the rest of the answer is lost, after the leases are durable
    again = pb.LeasePromptsRequest(
        worker=pb.Caller(name="rollout-0", attempt=1), max_groups=1, request=2
    )
    prompts = [
        pb.LeasedGroup.FromString(answer.group.data).prompt
        async for answer in client.stub.LeasePrompts(again, metadata=rpc.metadata(""), timeout=10)
        if answer.HasField("group")
    ]
    assert [(p.group_id, p.lease_attempt) for p in prompts] == [(0, 1), (1, 1)]
    stats = await client.stats()
    assert (stats.leases, stats.counters["leases_granted"]) == (2, 2)


async def test_a_call_that_a_later_one_has_overtaken_leases_nothing(client: Client) -> None:
    caller = pb.Caller(name="rollout-0", attempt=1)
    late = pb.LeasePromptsRequest(worker=caller, max_groups=2, request=1)
    newer = pb.LeasePromptsRequest(worker=caller, max_groups=1, request=2)
    assert (
        len(
            [
                a
                async for a in client.stub.LeasePrompts(
                    newer, metadata=rpc.metadata(""), timeout=10
                )
                if a.HasField("group")
            ]
        )
        == 1
    )
    with pytest.raises(Exception, match="was overtaken by a later one"):
        [a async for a in client.stub.LeasePrompts(late, metadata=rpc.metadata(""), timeout=10)]
    assert (await client.stats()).leases == 1


async def test_a_new_process_of_a_worker_counts_its_calls_anew(client: Client) -> None:
    caller = pb.Caller(name="rollout-0", attempt=1)
    for number, session in ((9, 1), (1, 2), (2, 2)):
        request = pb.LeasePromptsRequest(
            worker=caller, max_groups=1, request=number, session=session
        )
        answers = client.stub.LeasePrompts(request, metadata=rpc.metadata(""), timeout=10)
        assert len([a async for a in answers if a.HasField("group")]) == 1


async def test_a_group_that_is_too_large_is_refused_and_its_lease_goes_back(
    make_server: Callable[..., BufferProcess],
) -> None:
    server = make_server(buffer={"memory": "400Mi", "storage": {"size": "1Gi"}})
    async with Client(server.start()) as client:
        first, second = (await client.lease(count=2)).groups
        large = make_group(first.prompt, response=3_000_000)
        answers = await client.submit([large, make_group(second.prompt)])
        assert answers[0].outcome == pb.SubmitResponse.OUTCOME_REFUSED
        assert f"a group of {large.ByteSize()} bytes" in answers[0].message
        assert "Make spec.buffer.memory larger" in answers[0].message
        assert answers[1].outcome == STORED
        (again,) = (await client.lease("rollout-1")).groups
        assert (again.prompt.group_id, again.prompt.lease_attempt) == (first.prompt.group_id, 2)


async def test_many_groups_at_once_wait_for_each_other(
    make_server: Callable[..., BufferProcess],
) -> None:
    server = make_server(
        rollout__batchSize=24, buffer={"memory": "400Mi", "storage": {"size": "1Gi"}}, rows=24
    )
    async with Client(server.start()) as client:
        leased = (await client.lease(count=24)).groups
        noise = np.random.default_rng(0).bytes(1)
        groups = [make_group(g.prompt, response=500_000 + noise[0]) for g in leased]
        answers = await client.submit(groups)
        assert {answer.outcome for answer in answers.values()} == {STORED}
